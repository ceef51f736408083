"""How do blocks of weights come to the device and leave it, and how do gradients come home?"""
