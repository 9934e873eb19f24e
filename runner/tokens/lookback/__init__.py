"""Whether what a template writes behind a turn can depend on what came before it, read from the template's source.

This is an abstract interpretation of the template. It is rendered once, over abstract values (`values`): those that are
known, symbols for what is the same after every past, and unknown ones for what the past may decide. Between the first
question and the last turn stands a gap, with any number of messages of any role in any order (`positions`).

- Every operation has a transfer function, which says of abstract operands what can be said of the result (`operators`,
  `filters`). Where all is known, jinja itself computes it.
- Where a condition is unknown, both branches are taken, and what they leave is joined (`join`, `evaluator`).
- A loop over the gap is run until another pass changes nothing, which is its fixpoint (`interpreter`).

If nothing unknown stands behind the turn's words in what is written, no past changes that (`proof`). All of it errs on
one side: a template that does what is not modelled here is not proven, and its whole history is rendered instead.
"""
