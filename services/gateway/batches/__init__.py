"""How are batches carried out?"""
