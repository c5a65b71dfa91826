"""Language models and translation, beside the training of them.

`ngrams` are the models that `tools.kneser_ney` learns, and
`translation_scores` what `tools.evaluate` says of translations.
"""
