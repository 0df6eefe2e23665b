"""Do rows go to experts, or do experts come to rows?"""
