"""Which of a model's parameters are managed, who keeps them, and what do its modules do differently?"""
