"""Rules that say what a trainer's leaf becomes; one file per question.

`containers`: which leaves are in stacked layers, and which names are unknown.
`stacks`: which layers a stacked leaf holds, family by family.
`axes`: which axes of a leaf are the stacked ones.
`experts`: which leaves are routed experts, and how wide they become.
`heads`: which leaves have KV heads, and how often these are repeated.
`dtypes`: which leaves keep their dtype.
`layouts`, `entries`: what all of these make of one leaf.
"""
