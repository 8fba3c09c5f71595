"""Speculative decoding: guess what comes next, let the model look at all guesses in one step, keep what it
would have chosen itself.

    proposer.py      what a proposer is given, and gives
    suffix.py        guesses from the request's own text
    draft.py         guesses by a small model
    verification.py  which guesses are right, and the token after them
    controller.py    whether guessing pays
    speculator.py    all of it, as the engine sees it

Invariant: a request's tokens are those it would have without guesses. Verification draws each token from the
model's own distribution with the random number that plain decoding would use, and only then looks whether it
is the guess; a proposer can cost time, never an answer.
"""
