"""Worker processes: started, told, watched and replaced; and the pool whose environments they step."""
