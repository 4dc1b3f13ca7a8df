"""Finders: settings that are measured on this machine, one module each (finder.py has the seam)."""
