"""Rewriting proved chains into packed operators."""
