"""How do rows and experts meet?"""
