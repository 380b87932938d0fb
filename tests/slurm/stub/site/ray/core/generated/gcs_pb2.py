from types import SimpleNamespace

GcsNodeInfo = SimpleNamespace(GcsNodeState=SimpleNamespace(ALIVE=0, DEAD=1))
