"""What a policy would do with traffic that nobody has to suffer: rollouts in simulated time.

Traffic is made from a seed, as arrays; the arms are chosen by weight and conversation as the gateway does it;
what the pods would tell becomes evidence in its order of arrival; and the *real* `gates` and `plan.decide`
judge it. Invariant: nothing here decides. A simulation differs from production in where requests come from
and in what the clock says, and in nothing else.
"""
