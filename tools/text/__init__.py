"""Language models and translation, beside the training of them.

`ngrams` are the models that `tools.kneser_ney` learns. A `translator` works for
`tools.translate`; `translation_scores` are what `tools.evaluate` says of it.
"""
