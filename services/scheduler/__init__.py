"""The scheduler owns the placement and its epoch.

Four verbs, one module each:

=======  ==========================================================  ==============================
verb     meaning                                                     where
=======  ==========================================================  ==============================
propose  name a placement that could be, without weighing it         ``fleet``: for the workers there
                                                                     are; ``planning.solver``: for the
                                                                     traffic, by a policy
plan     weigh what policies propose by replaying recent traffic     ``planning.planner``
decide   choose what is done now, and write it to the log            ``loop``
place    have workers load a placement under a new epoch, commit it  ``epochs.placer``
=======  ==========================================================  ==============================

An operator's pins and orders are proposals, too: ``loop`` decides about them like about the others.
"""
