"""Answers to hidden states: rows -> token ids and loss mask -> states -> a trainer's own format.

Needs the extra `quantroute[extract]`. Nothing here talks to a paid service.
"""
