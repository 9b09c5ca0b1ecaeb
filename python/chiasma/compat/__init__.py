"""Interfaces of other libraries, kept by Chiasma: see flash_mla."""
