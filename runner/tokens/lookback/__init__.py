"""Proof, from a template's source, that the text after a turn does not depend on earlier messages.

This is an abstract interpretation of the template. The template is rendered once, over abstract values (`values`):
known values, symbols for values that do not depend on earlier messages, and unknown values, which may depend on earlier
messages. Between the first user message and the last turn is a gap, with any number of messages of any role in any
order (`positions`).

- Every operation has a transfer function, which computes an abstract result from abstract operands (`operators`,
  `filters`). If all operands are known, jinja itself computes it.
- If a condition is unknown, both branches are taken, and their states are joined (`join`, `evaluator`).
- A loop over the gap is run until another pass changes nothing: its fixpoint (`interpreter`).

If no unknown value follows the turn's words in the output, no earlier message changes that text (`proof`). The
analysis is conservative: a template with an operation that is not modelled is not proven, and its whole history is
rendered.
"""
