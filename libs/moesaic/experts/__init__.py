"""What does a holder of experts do?"""
