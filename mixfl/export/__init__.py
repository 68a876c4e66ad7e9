"""Trained models for use elsewhere: predictions, other formats, and a card that says what they are.

trained finds a run's model with its problem, tables reads and writes rows, formats writes the model
in another format and checks it, card describes a run.
"""
