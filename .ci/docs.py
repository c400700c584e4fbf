"""Build the site or the README from the notebooks.

    python .ci/docs.py site     # _docs, with Quarto if it is installed, otherwise with smalldocs
    python .ci/docs.py readme   # README.md, from nbs/index.ipynb
"""
import re,shutil,subprocess,sys
from pathlib import Path
from fastcore.nbio import read_nb,write_nb
from nbdev.config import get_config
from nbdev.doclinks import _build_modidx
from nbdev.quarto import nbdev_docs,refresh_quarto_yml
from nbdev.serve import proc_nbs

cfg = get_config()
bin = Path(sys.executable).parent

def smalldocs(*args): subprocess.run([bin/'smalldocs', *args], check=True)

def processed():
    "The notebooks as nbdev processes them for either renderer"
    refresh_quarto_yml(); _build_modidx()
    cache = Path(proc_nbs(cfg.nbs_path, force=True))
    # what only Quarto reads: `format-links` asks for the Markdown copies that `llms-txt` makes, `output-file` repeats the notebook's name
    y = cache/'nbdev.yml'
    y.write_text(re.sub(r'\nformat-links:.*', '\n', y.read_text(), flags=re.S))
    for p in cache.rglob('*.ipynb'):
        nb = read_nb(p)
        for c in nb.cells: c.source = re.sub(rf'^output-file: {p.stem}\.html\n', '', c.source, flags=re.M)
        write_nb(nb, p)
    return cache

def site():
    if shutil.which('quarto'): nbdev_docs.__wrapped__()
    else:
        cache = processed()
        smalldocs('check', cache)
        smalldocs('render', '--strict', '--quiet', cache)
        shutil.rmtree(cfg.doc_path, ignore_errors=True)
        shutil.move(cache/cfg.doc_path.name, cfg.doc_path)
    stay_on_site()
    print(f'{len(list(cfg.doc_path.rglob("*.html")))} pages in {cfg.doc_path.name}/')

def stay_on_site():
    "Make the links to pages of this site relative, which nbdev writes with the address that the site will have"
    for p in cfg.doc_path.rglob('*.html'):
        up = '../'*(len(p.relative_to(cfg.doc_path).parts)-1) or './'
        p.write_text(p.read_text().replace(f'<a href="{cfg.doc_host}{cfg.doc_baseurl}/', f'<a href="{up}'))

def readme():
    cache = processed()
    smalldocs('render', '--quiet', cache)
    site,images = cache/cfg.doc_path.name,cfg.nbs_path/'images'
    shutil.rmtree(images, ignore_errors=True)
    shutil.copytree(site/'index_files', images)
    at = f'{cfg.git_url}/raw/{cfg.branch}/nbs/images/'   # PyPI shows no images by a relative path
    text = (site/'index.llms.md').read_text().replace('](index_files/', f']({at}')
    (cfg.config_path/'README.md').write_text(text)

if __name__=='__main__': dict(site=site, readme=readme)[sys.argv[1]]()
