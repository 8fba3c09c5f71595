"""Generated SQL: parses in its dialect, is one statement, and names only tables and columns that exist.

Names are resolved as a database would, scope by scope, through aliases, CTEs and subqueries; case does not
matter. Where columns can't be known (a table function, a pivot) any name is taken. Invariant: nothing is run,
and no text, however odd, raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel
from sqlglot.optimizer.scope import Scope, traverse_scope

from ..api.evalsuite import Sql
from .excerpt import meant

MAX_CHARS = 20_000
MAX_BRACKETS = 100
"""Of ``[``: each one after another takes the parser longer, a thousand of them 10 s."""
# It warns of statements that it does not know, with their text, which is an answer's.
logging.getLogger("sqlglot").setLevel(logging.CRITICAL)

_FENCES = ("sql", "postgresql", "pgsql", "plsql", "tsql", "sqlite3")
_CHANGES = (
    exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.Create, exp.Drop, exp.Alter, exp.TruncateTable,
    exp.Command, exp.Into, exp.Lock, exp.Set, exp.Pragma, exp.Use, exp.Copy, exp.LoadData, exp.Kill,
    exp.Grant, exp.Transaction, exp.Commit, exp.Rollback, exp.Attach, exp.Detach,
)  # fmt: skip
_HAVING_KNOWS_NO_ALIAS = frozenset({"postgres", "tsql", "oracle"})
_GROUP_KNOWS_NO_ALIAS = frozenset({"tsql", "oracle"})
_ALIAS_ANYWHERE = frozenset({"snowflake", "databricks", "spark", "redshift", "clickhouse", "duckdb"})

Columns = frozenset[str] | None
"""Names that a source has; None: not known."""


def known_dialect(dialect: str) -> bool:
    """Whether ``dialect`` can be parsed; empty is standard SQL."""
    return not dialect or sqlglot.Dialect.get(dialect) is not None


def failures(text: str, expected: Sql) -> list[str]:
    """Why the answer is not the SQL that was asked for; empty: it is."""
    source = meant(text, (*_FENCES, expected.dialect), ";\n")
    if len(source) > MAX_CHARS:
        return [f"is longer than {MAX_CHARS} characters, which is not parsed"]
    if source.count("[") > MAX_BRACKETS:
        return [f"has more than {MAX_BRACKETS} brackets, which is not parsed"]
    dialect = f"{expected.dialect} " if expected.dialect else ""
    # Whatever the parser raises on an answer (it has many ways) means that it could not make sense of it.
    try:
        parsed = sqlglot.parse(source, read=expected.dialect or None, error_level=ErrorLevel.RAISE)
        statements = [statement for statement in parsed if statement is not None]
    except Exception:
        return [f"does not parse as {dialect}SQL"]
    if len(statements) != 1:
        return ["is more than one statement" if statements else "holds no statement"]
    try:
        return list(dict.fromkeys(_judge(statements[0], expected)))
    except Exception:
        return [f"could not be understood as {dialect}SQL"]


def _judge(statement: exp.Expr, expected: Sql) -> Iterator[str]:
    if not isinstance(statement, exp.Query | exp.DML | exp.DDL | exp.Command | exp.Alter | exp.Drop):
        yield "is not a statement"
        return
    changes = not isinstance(statement, exp.Query) or statement.find(*_CHANGES) is not None
    if changes and expected.read_only:
        yield "is not a plain query, and nothing else is allowed"
        return
    if isinstance(statement, exp.Command):
        yield "is a kind of statement whose names can't be checked"
        return
    for name in statement.find_all(exp.Identifier):
        name.set("this", name.name.lower())
    tables = {t.name.lower(): frozenset(c.lower() for c in t.columns) for t in expected.tables}
    if isinstance(statement, exp.Query):
        yield from _Names(tables, expected.dialect).failures(statement)
    else:
        yield from _loosely(statement, tables)


class _Names:
    """Resolves the names of one query. Columns are sets, so that no nesting of ``*`` grows without bound."""

    def __init__(self, tables: Mapping[str, frozenset[str]], dialect: str) -> None:
        self._tables = tables
        self._dialect = dialect
        self._outputs: dict[int, Columns] = {}

    def failures(self, query: exp.Expr) -> Iterator[str]:
        for scope in traverse_scope(query):
            for name, source in self._selected(scope):
                if isinstance(source, exp.Table) and self._of(name, source, scope) == frozenset():
                    yield _undeclared(source)
            yield from self._joins(scope)
            for column in scope.find_all(exp.Column):
                told = self._column(column, scope)
                if told:
                    yield told

    def _selected(self, scope: Scope) -> list[tuple[str, exp.Table | Scope]]:
        return [(name, source) for name, (_, source) in scope.selected_sources.items()]

    def _joins(self, scope: Scope) -> Iterator[str]:
        sources = [self._of(name, source, scope) for name, source in self._selected(scope)]
        for join in scope.expression.args.get("joins") or []:
            for using in join.args.get("using") or []:
                having = sum(columns is None or using.name in columns for columns in sources)
                if having < 2:
                    yield "joins by a column that the tables don't share"

    def _column(self, column: exp.Column, scope: Scope) -> str:
        if column.args.get("db"):
            qualifier = ".".join(part.name for part in column.parts[:-1])
            return self._qualified_by_table(qualifier, column, scope)
        at: Scope | None = scope
        while at is not None:
            sources = dict(self._selected(at))
            if column.table:
                if column.table in sources:
                    return self._in_source(column, column.table, sources[column.table], at)
            elif (told := self._bare(column, at, sources)) is not None:
                return told
            at = at.parent if at.can_be_correlated or at.is_udtf or at.is_set_operation else None
        if column.table:
            return "names a column of something that is not in its FROM"
        return "names a column that none of its tables has"

    def _qualified_by_table(self, qualifier: str, column: exp.Column, scope: Scope) -> str:
        for name, source in self._selected(scope):
            if isinstance(source, exp.Table) and _full_name(source) == qualifier:
                return self._in_source(column, name, source, scope)
        return "names a column of something that is not in its FROM"

    def _in_source(self, column: exp.Column, name: str, source: exp.Table | Scope, scope: Scope) -> str:
        columns = self._of(name, source, scope)
        unknown = columns is not None and columns and column.name not in columns
        if not unknown or isinstance(column.this, exp.Star):
            return ""
        if isinstance(source, exp.Table):
            return f"names a column that table {_full_name(source)} does not have"
        return "names a column that its subquery does not give"

    def _bare(self, column: exp.Column, scope: Scope, sources: Mapping[str, exp.Table | Scope]) -> str | None:
        """Whether a name without a table is right here; None: look further out."""
        if self._is_alias(column, scope):
            return ""
        known = [self._of(name, source, scope) for name, source in sources.items()]
        num_having = sum(columns is not None and column.name in columns for columns in known)
        if num_having == 1 or (num_having and self._is_shared(column, scope)):
            return ""
        if num_having:
            return "names a column that several of its tables have, without saying which"
        if any(columns is None or not columns for columns in known):
            return ""  # Told already, or not to be known.
        return None

    def _is_alias(self, column: exp.Column, scope: Scope) -> bool:
        query = scope.expression
        if not isinstance(query, exp.Query) or column.name not in query.named_selects:
            return False
        if self._dialect in _ALIAS_ANYWHERE:
            return True
        clause = column.find_ancestor(
            exp.Select, exp.SetOperation, exp.Order, exp.Group, exp.Having, exp.Qualify
        )
        if isinstance(clause, exp.Having):
            return self._dialect not in _HAVING_KNOWS_NO_ALIAS
        if isinstance(clause, exp.Group):
            return self._dialect not in _GROUP_KNOWS_NO_ALIAS
        return isinstance(clause, exp.Order | exp.Qualify)

    def _is_shared(self, column: exp.Column, scope: Scope) -> bool:
        """Whether a join makes one column of those of the same name."""
        joins = scope.expression.args.get("joins") or []
        return any(
            join.method == "NATURAL" or column.name in [using.name for using in join.args.get("using") or []]
            for join in joins
        )

    def _of(self, name: str, source: exp.Table | Scope, scope: Scope) -> Columns:
        """Columns of a source; empty: a table that is not declared."""
        if isinstance(source, Scope):
            columns = self._output(source)
            node = scope.selected_sources[name][0] if name in scope.selected_sources else None
            renamed = node.alias_column_names if isinstance(node, exp.Table | exp.Subquery) else []
            return frozenset(renamed) if renamed else columns
        if source.args.get("pivots") or (
            isinstance(source.this, exp.Func) and not _is_unknown_function(source)
        ):
            return None
        if isinstance(source.this, exp.Func):
            return frozenset()
        columns = self._tables.get(_full_name(source), frozenset())
        renamed = source.alias_column_names
        return frozenset(renamed) if columns and renamed else columns

    def _output(self, scope: Scope) -> Columns:
        if id(scope) not in self._outputs:
            self._outputs[id(scope)] = None  # A CTE that names itself: its first part has told its columns.
            self._outputs[id(scope)] = self._compute_output(scope)
        return self._outputs[id(scope)]

    def _compute_output(self, scope: Scope) -> Columns:
        cte = scope.expression.find_ancestor(exp.CTE) if scope.is_cte else None
        renamed = scope.outer_columns or (cte.alias_column_names if cte is not None else [])
        if renamed:
            return frozenset(renamed)
        if scope.set_operation_scopes:
            return self._output(scope.set_operation_scopes[0])
        query = scope.expression
        if not isinstance(query, exp.Select):
            return None
        names = set[str]()
        for select in query.selects:
            if not select.is_star:
                names.add(select.alias_or_name)
                continue
            only = select.table if isinstance(select, exp.Column) else ""
            for name, source in self._selected(scope):
                columns = self._of(name, source, scope) if only in ("", name) else frozenset()
                if columns is None or (not columns and only in ("", name)):
                    return None
                names |= columns
        return frozenset(names)


def _is_unknown_function(table: exp.Table) -> bool:
    """A function in FROM that nobody declared could read anything: query_to_xml('select …')."""
    return isinstance(table.this, exp.Anonymous)


def _full_name(table: exp.Table) -> str:
    return ".".join(part.name for part in table.parts)


def _undeclared(table: exp.Table) -> str:
    if isinstance(table.this, exp.Func):
        return "reads from a function that is not declared"
    return "names a table that is not declared"


def _loosely(statement: exp.Expr, tables: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Statements that change data: each name must exist, without asking where."""
    ctes = {cte.alias for cte in statement.find_all(exp.CTE)}
    known = {name for cte in statement.find_all(exp.CTE) for name in cte.this.named_selects}
    known |= {alias.alias for alias in statement.find_all(exp.Alias)}
    for table in statement.find_all(exp.Table):
        name = _full_name(table)
        if name not in ctes and name not in tables:
            yield _undeclared(table)
        known |= tables.get(name, frozenset())
    names = [
        column.name for column in statement.find_all(exp.Column) if not isinstance(column.this, exp.Star)
    ]
    names += [name.name for schema in statement.find_all(exp.Schema) for name in schema.expressions]
    if not known.issuperset(names):
        yield "names a column that none of its tables has"
