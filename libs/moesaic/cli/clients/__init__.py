"""What do the services of a running suite say?"""
