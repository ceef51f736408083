"""How do weights come to the device when a model computes, and how do gradients leave it?"""
