import os
import signal
import sys
import time

how, code = sys.argv[1], int(sys.argv[2])
if how == "os._exit" and code == 0:
    os._exit(0)
if os.environ["RANK"] == "1":
    if how == "sys.exit":
        sys.exit(code)
    if how == "os._exit":
        os._exit(code)
    os.kill(os.getpid(), getattr(signal, how))
time.sleep(code)
