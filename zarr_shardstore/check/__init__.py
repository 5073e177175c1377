"""Checks of stored bytes against their documents, indexes and checksums. Nothing is written"""
