"Two processes against one that trains on all their samples, on the CPU over loopback; tests/several.py has the cases"
import os,socket,subprocess,sys
import pytest
pytest.importorskip('accelerate',
                    reason='fastai trains in several processes through accelerate, which is not installed')
from several import *

LIMIT = 480   # seconds for all cases together, on a busy machine

def free_port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

def run(world, folder, names, limit=LIMIT):
    "Start the processes, and wait for all of them: exit codes and what they print"
    env = {**os.environ, 'PYTHONPATH':os.pathsep.join([str(Path(__file__).resolve().parents[2]),
                                                       os.environ.get('PYTHONPATH','')]), 'OMP_NUM_THREADS':'1'}
    logs = [folder/f'log{r}' for r in range(world)]
    args = lambda r: [sys.executable, '-W', 'ignore', Path(__file__).parent.parent/'several.py', str(r), str(world),
                      folder, *names]
    ps = [subprocess.Popen(args(r), env=env, stdout=logs[r].open('w'), stderr=subprocess.STDOUT) for r in range(world)]
    end = time.time()+limit
    try: codes = [p.wait(max(1, end-time.time())) for p in ps]
    finally:
        for p in ps: p.kill()
    return codes,[l.read_text() for l in logs]

def started(worlds, tmp_path_factory):
    "What the processes have trained, by their number; started when first asked for"
    done = {}
    def get(world):
        if world not in done:
            folder = tmp_path_factory.mktemp(f'world{world}')
            done[world] = folder,*run(world, folder, worlds[world])
        folder,codes,logs = done[world]
        assert not any(codes), '\n'.join(o[-3000:] for o in logs)
        return folder
    return get

def load(folder, name, world):
    return [torch.load(folder/f'{name}.{r}', 'cpu', weights_only=False) for r in range(world)]

def compare(folder, name, world):
    "What the processes have trained, with what one process trains"
    alone = result(cases[name].alone(world))
    assert alone['n_steps']>0
    for several in load(folder, name, world):
        for k in alone:
            if k!='seen' and k not in cases[name].but: close(several[k], alone[k])

names = ('tail uneven weighted one_is_empty dropped ctx_odd ctx_scaler sched cut_coupled auto recovers '
         'synced synced_uneven breaks_model').split()

@pytest.fixture(scope='module')
def folder(tmp_path_factory): return started({2:names}, tmp_path_factory)(2)

@pytest.mark.parametrize('name', names)
def test_same_as_one_process(name, folder): compare(folder, name, 2)
