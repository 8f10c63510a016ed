"""Rules that say what a trainer's leaf becomes; one file per question.

`containers`: which layers a leaf holds and what they are called.
`experts`: which leaves are routed experts, and how they are joined and padded.
`heads`: which leaves have KV heads, and how often these are repeated.
`dtypes`: which leaves keep their dtype.
"""
