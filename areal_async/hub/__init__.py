"""What a run gives to the Hugging Face Hub: folders of a model and of a data set, each with a card, and their upload.

Nothing private is in either: settings are shown without it, and a folder that has a known secret is never there.
"""
