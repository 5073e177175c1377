"""Checks of stored bytes against their documents, indexes and checksums; and their repair"""
