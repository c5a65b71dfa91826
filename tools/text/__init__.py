"""What programs share that read or write text.

A `translator` works for trained models, `translation_scores` for their texts.
"""
