"""What does brownout cost in right answers?"""
