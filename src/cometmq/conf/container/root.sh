#!/bin/sh
# Copies the content of the image to the directory $1: /opt/cometmq, its Python, a shell, the programs that start scripts use,
# and the shared libraries of all these. Other files of the build stage do not get into the image.
set -eu
root=$1
about() { /opt/cometmq/bin/python -c "import os, sys, sysconfig; print($1)"; }
stdlib=$(about 'sysconfig.get_path("stdlib")')
python=$(about 'os.path.realpath(sys.executable)')
programs=$(for each in sh cat cp dirname hostname ls mkdir readlink sleep; do command -v $each; done)

# Remove packages that servers do not import.
for each in pip setuptools pkg_resources _distutils_hack distutils-precedence.pth; do
    rm -rf /opt/cometmq/lib/python*/site-packages/$each /opt/cometmq/lib/python*/site-packages/$each-* /opt/cometmq/bin/$each*
done
find /opt/cometmq \( -name tests -o -name include \) -type d -prune -exec rm -rf {} +
find /opt/cometmq \( -name '*.pyi' -o -name '*.a' -o -name '*.pyx' -o -name '*.pxd' \) -delete
# strip damages the libraries in *.libs, which auditwheel has edited.
find /opt/cometmq "$stdlib" -name '*.so' -not -path '*.libs/*' -exec strip --strip-unneeded {} +
# Servers cannot write bytecode into the image, so the modules that their starts import are compiled here.
for each in cli.servers broker_process namesrv.server metrics.port grpc.endpoint console.app; do
    /opt/cometmq/bin/python -c "import urllib.request, cometmq.$each" 2>/dev/null || true  # EXTRAS may lack its packages
done

install -m 755 "$(dirname "$0")/single.sh" /opt/cometmq/bin/cometmq-single

mkdir -p "$root"
set --
for each in site-packages dist-packages test idlelib tkinter turtledemo ensurepip lib2to3 pydoc_data 'config-*'; do
    set -- "$@" "--exclude=$stdlib/$each"
done
tar -cP "$@" /opt/cometmq "$python" "$stdlib" | tar -x -C "$root"
cp -L --parents $programs /etc/ld.so.cache "$root"
[ -e "$root/bin" ] || ln -s usr/bin "$root/bin"
{ find /opt/cometmq "$stdlib" -name '*.so*' -type f; echo $programs $python; } | xargs ldd 2>/dev/null \
    | grep -o '/[^ )]*\.so[^ ]*' | grep -v '^/opt/cometmq\|:$' | sort -u | xargs cp -L --parents -t "$root"
# The venv's python may be a chain of links to the interpreter: make it one link.
ln -sf "$python" "$root/opt/cometmq/bin/python3"

mkdir -p "$root/etc/ssl/certs"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" 2>/dev/null || true
echo 'cometmq:x:10001:10001::/var/lib/cometmq:/bin/sh' > "$root/etc/passwd"
echo 'cometmq:x:10001:' > "$root/etc/group"
install -d -m 1777 "$root/tmp"
install -d -o 10001 -g 10001 -m 0700 "$root/etc/cometmq" "$root/run/cometmq" "$root/var/lib/cometmq"
