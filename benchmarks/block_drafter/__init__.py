"""A study: how many tokens per deep pass a drafter of whole blocks gives, against the exit head that drafts one by one."""
