"""A study: tokens per deep pass of a drafter of whole blocks, against the exit head that drafts one by one."""
