"""How would a fleet serve recorded or drawn traffic? Pure: policies, traces and costs in, figures out."""
