"""Where do weights lie while nobody computes with them, and how do they come from a disk?"""
