"""How do rows reach the workers that hold their experts?"""
