"""How fast do edge servers answer that call each other's experts, by placement, size of fleet and links?"""
