"""What happens when an offloaded model is called, and when backward goes through it?"""
