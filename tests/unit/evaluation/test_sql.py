"""SQL by cases: which queries a database with these tables would take, and what is told of the others."""

from __future__ import annotations

import logging
import sqlite3
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.api.evalsuite import Sql
from sluice_operator.evaluation import sql

TABLES = {
    "customers": ["id", "name", "city"],
    "orders": ["id", "customer_id", "total", "status", "placed_at"],
    "items": ["order_id", "sku", "quantity"],
}


def expected(dialect: str = "sqlite", read_only: bool = True) -> Sql:
    tables = [{"name": name, "columns": columns} for name, columns in TABLES.items()]
    return Sql.model_validate({"dialect": dialect, "tables": tables, "readOnly": read_only})


GOOD = [
    "SELECT name FROM customers",
    "select NAME from Customers;",
    "SELECT * FROM orders",
    "SELECT o.* FROM orders AS o WHERE o.total > 10 ORDER BY o.placed_at DESC LIMIT 5",
    "SELECT count(*) FROM orders WHERE status = 'open'",
    "SELECT c.name, SUM(o.total) AS spent FROM customers c JOIN orders o ON o.customer_id = c.id"
    " GROUP BY c.name HAVING SUM(o.total) > 100 ORDER BY spent DESC",
    "SELECT name FROM customers JOIN orders ON customer_id = customers.id",
    "SELECT sku FROM orders JOIN items ON items.order_id = orders.id WHERE quantity > 1",
    "WITH big AS (SELECT customer_id, total FROM orders WHERE total > 9) SELECT name FROM big"
    " JOIN customers ON customers.id = big.customer_id",
    "WITH big(who, much) AS (SELECT customer_id, total FROM orders) SELECT who, much FROM big",
    "WITH Big AS (SELECT * FROM orders) SELECT total FROM big",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9) SELECT i FROM n",
    "SELECT spent FROM (SELECT customer_id, SUM(total) AS spent FROM orders GROUP BY customer_id) AS s",
    "SELECT name FROM customers WHERE id IN (SELECT customer_id FROM orders)",
    "SELECT name FROM customers c WHERE EXISTS (SELECT 1 FROM orders o WHERE o.customer_id = c.id)",
    "SELECT name, (SELECT MAX(total) FROM orders WHERE customer_id = customers.id) AS m FROM customers",
    "SELECT id FROM customers UNION SELECT customer_id FROM orders",
    "SELECT id FROM customers UNION ALL SELECT id FROM orders ORDER BY id",
    "SELECT a.id FROM orders a, orders b WHERE a.total = b.total AND a.id < b.id",
    "SELECT name, RANK() OVER (PARTITION BY city ORDER BY id) AS r FROM customers",
    "SELECT CASE WHEN total > 9 THEN 'big' ELSE 'small' END AS size, COUNT(*) FROM orders GROUP BY size",
    "SELECT strftime('%Y', placed_at) AS year FROM orders",
    "SELECT total FROM (SELECT * FROM (SELECT * FROM orders))",
    "Here is the query:\n```sql\nSELECT name FROM customers\n```\nIt lists names.",
    "SELECT name -- the name\nFROM customers /* all */",
    "SELECT x.total FROM (SELECT * FROM orders UNION ALL SELECT * FROM orders) AS x",
    "SELECT orders.id, customers.id FROM orders LEFT JOIN customers ON customer_id = customers.id",
]
BAD = [
    ("SELECT name FROM clients", "names a table that is not declared"),
    ("SELECT email FROM customers", "names a column that none of its tables has"),
    ("SELECT c.email FROM customers c", "names a column that table customers does not have"),
    ("SELECT o.name FROM orders o JOIN customers c ON o.customer_id = c.id", "table orders does not have"),
    ("SELECT customers.name FROM customers c", "something that is not in its FROM"),
    ("SELECT x.id FROM customers c", "something that is not in its FROM"),
    ("SELECT id FROM customers JOIN orders ON customer_id = customers.id", "several of its tables have"),
    ("SELECT name FROM customers WHERE id IN (SELECT client FROM orders)", "none of its tables has"),
    ("SELECT name FROM customers WHERE EXISTS (SELECT 1 FROM orders o WHERE o.x = customers.id)", "orders"),
    ("SELECT total FROM (SELECT customer_id FROM orders) AS s", "none of its tables has"),
    ("SELECT s.total FROM (SELECT customer_id FROM orders) AS s", "its subquery does not give"),
    ("WITH b AS (SELECT id FROM orders) SELECT b.total FROM b", "its subquery does not give"),
    ("WITH b(n) AS (SELECT id FROM orders) SELECT id FROM b", "none of its tables has"),
    ("WITH b AS (SELECT id FROM secrets) SELECT id FROM b", "names a table that is not declared"),
    ("SELECT name FROM customers ORDER BY age", "none of its tables has"),
    ("SELECT city FROM customers GROUP BY city HAVING MAX(age) > 3", "none of its tables has"),
    ("SELECT name FROM customers JOIN orders USING (name)", "that the tables don't share"),
    ("SELECT id FROM customers UNION SELECT secret FROM orders", "none of its tables has"),
    ("SELECT name FROM other.customers", "names a table that is not declared"),
    ("DELETE FROM customers", "is not a plain query"),
    ("UPDATE orders SET total = 0", "is not a plain query"),
    ("INSERT INTO items SELECT id, 'x', 1 FROM orders", "is not a plain query"),
    ("DROP TABLE orders", "is not a plain query"),
    ("PRAGMA table_info(orders)", "not a"),
    ("EXPLAIN DELETE FROM orders", "is not a"),
    ("ATTACH DATABASE 'x' AS y", "is not a statement"),
    ("SELECT name FROM customers; DROP TABLE customers", "is more than one statement"),
    ("```sql\nSELECT 1\n```\nor\n```sql\nSELECT 2\n```", "is more than one statement"),
    ("SELECT name FROM", "does not parse as sqlite SQL"),
    ("SELECT name FROM customers WHERE (id = 1", "does not parse as sqlite SQL"),
    ("", "holds no statement"),
    ("-- nothing", "holds no statement"),
    ("There is no such table.", "sqlite SQL"),
    ("hello", "is not a statement"),
    ("SELECT 'abc FROM customers", "does not parse"),
    ("SELECT 1" + ", 1" * 10_000, "is longer than 20000 characters"),
    ("SELECT a" + "[1]" * 200, "has more than 100 brackets"),
    ("SELECT " + "(" * 5000, "does not parse"),
]


@pytest.mark.parametrize("query", GOOD)
def test_what_a_database_takes(query: str) -> None:
    assert sql.failures(query, expected()) == []


@pytest.mark.parametrize("query", [query for query in GOOD if "```" not in query])
def test_the_good_cases_are_good(query: str) -> None:
    """The oracle is a real database."""
    database = sqlite3.connect(":memory:")
    for name, columns in TABLES.items():
        database.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
    database.execute(query)


@pytest.mark.parametrize(("query", "why"), BAD)
def test_what_it_refuses(query: str, why: str) -> None:
    found = sql.failures(query, expected())
    assert any(why in told for told in found), found


POSTGRES = [
    ("SELECT date_trunc('month', placed_at) AS m, SUM(total) FROM orders GROUP BY m", True),
    ("SELECT total::int FROM orders WHERE placed_at > now() - interval '7 days'", True),
    ("SELECT DISTINCT ON (customer_id) customer_id, total FROM orders ORDER BY customer_id, total", True),
    ("SELECT g FROM generate_series(1, 3) AS g", True),
    ("SELECT n.name, o.total FROM customers n CROSS JOIN LATERAL"
     " (SELECT total FROM orders WHERE customer_id = n.id LIMIT 1) o", True),
    ("SELECT COUNT(*) FILTER (WHERE status = 'open') FROM orders", True),
    ("SELECT city, COUNT(*) AS k FROM customers GROUP BY city HAVING k > 2", False),
    ("SELECT query_to_xml('select 1', true, true, '')", True),
    ("SELECT * FROM query_to_xml('select * from secrets', true, true, '')", False),
    ("WITH gone AS (DELETE FROM orders RETURNING *) SELECT * FROM gone", False),
    ("SELECT * INTO copy FROM orders", False),
    ("SELECT * FROM orders FOR UPDATE", False),
    ("SELECT * FROM pg_catalog.pg_user", False),
    ("SELECT `name` FROM customers", False),
    ("COPY orders TO '/tmp/x'", False),
]  # fmt: skip


@pytest.mark.parametrize(("query", "good"), POSTGRES)
def test_postgres(query: str, good: bool) -> None:
    assert (sql.failures(query, expected("postgres")) == []) is good


def test_the_dialect_matters() -> None:
    assert sql.failures("SELECT `name` FROM customers", expected("mysql")) == []
    assert sql.failures("SELECT TOP 3 name FROM customers", expected("tsql")) == []


CHANGES = [
    ("UPDATE orders SET total = 0 WHERE status = 'open'", []),
    ("INSERT INTO items (order_id, sku, quantity) VALUES (1, 'a', 2)", []),
    ("DELETE FROM orders WHERE customer_id IN (SELECT id FROM customers WHERE city = 'x')", []),
    ("UPDATE orders SET price = 0", ["names a column that none of its tables has"]),
    ("INSERT INTO items (order_id, price) VALUES (1, 2)", ["names a column that none of its tables has"]),
    ("DELETE FROM secrets", ["names a table that is not declared"]),
    ("VACUUM", ["is a kind of statement whose names can't be checked"]),
]


@pytest.mark.parametrize(("query", "told"), CHANGES)
def test_changes_where_they_are_allowed(query: str, told: list[str]) -> None:
    assert sql.failures(query, expected(read_only=False)) == told


def test_nested_stars_do_not_explode() -> None:
    """Each level joins the one before with itself: 2^60 columns, if they were written out."""
    ctes = ["t0 AS (SELECT * FROM orders)"]
    ctes += [f"t{n} AS (SELECT a.* FROM t{n - 1} a, t{n - 1} b)" for n in range(1, 60)]
    began = time.monotonic()
    found = sql.failures(f"WITH {', '.join(ctes)} SELECT total, price FROM t59", expected())
    assert found == ["names a column that none of its tables has"]
    assert time.monotonic() - began < 60


def test_the_parser_logs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        sql.failures("OPTIMIZE zqx7 ZORDER BY zqx8", expected("mysql", read_only=False))
    assert caplog.text == ""


WORDS = (
    "select from where join on using with as ( ) , ; * . 'x' \"y\" orders customers id total a b union in"
    " exists case"
)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(WORDS.split()), max_size=25))
def test_any_words_are_judged(words: list[str]) -> None:
    for told in sql.failures(" ".join(words), expected("postgres")):
        assert told
