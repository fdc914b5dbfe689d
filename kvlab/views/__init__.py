"""Pictures: pure functions from state and records to plotly figures.

Each of `ribbon`, `block_map`, `radix_tree` and `timeline` draws a figure, says it in words (``summary``) and lists its numbers
(``table``). `summary` holds the sentences, `details` the cards, `legend` and `tables` the HTML; `strings` holds every word,
`palette` every colour, `frame` every size.
"""
