"""The labels of risks, and the programs that a policy knows by name. What is made of them is in `risks.py`."""

from __future__ import annotations

from typing import Literal, TypeAlias

Label: TypeAlias = Literal[
    "destructive", "write", "network", "credential_read", "sudo", "package_install", "force_push", "outside_workspace",
    "pipe_to_shell", "catastrophic", "unknown", "unclear",
]  # fmt: skip
"""What a program may do. `catastrophic`: it destroys a disk, the machine or a whole system. `unknown`: the program is
not in the tables. `unclear`: what it does depends on what is not in the text, or the text is not understood."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


READING = _names(
    """
    cat tac head tail wc nl ls dir vdir cut paste rev fold expand unexpand fmt column comm cmp diff stat du df
    realpath readlink md5sum sha1sum sha224sum sha256sum sha384sum sha512sum b2sum cksum sum od hexdump
    join zcat which
    """
)
"""Every argument may be a path, which is read; no option does more."""

IGNORING = _names(
    """
    echo true false : pwd basename dirname seq sleep expr uname whoami id groups tty nproc uptime free type
    times umask exit return break continue shift getconf locale numfmt factor logname cal yes
    """
)
"""No argument is a path or does more than tell what to say."""

CHANGING_THE_SHELL = _names(
    """
    alias unalias shopt enable bind complete compgen let declare typeset mapfile readarray hash fc history getopts
    coproc jobs
    """
)
"""Builtins that change what names mean, or run what they hold."""

STARTING = _names(
    """
    nice nohup setsid time stdbuf ionice timeout command builtin exec xargs eval trap busybox toybox . source
    """
)
"""What they start is judged by itself."""

WRITING = _names(
    """
    cp mv mkdir touch tee ln install patch split csplit mktemp unzip zip tar gzip gunzip bzip2 bunzip2 xz unxz
    zstd ar sponge mkfifo mknod cpio 7z chmod chown chgrp setfacl rsync
    """
)
"""They change files."""

REMOVING = _names(
    """
    rm rmdir unlink shred truncate
    """
)
"""They remove files or what is in them."""

RULING = _names(
    """
    kill pkill killall systemctl service launchctl crontab at iptables nft ip ifconfig mount umount swapoff sysctl
    modprobe insmod rmmod useradd userdel usermod passwd groupadd chsh visudo fdisk parted sfdisk lvremove
    vgremove pvremove losetup
    """
)
"""They change the machine or end processes."""

REACHING = _names(
    """
    curl wget ssh scp sftp nc ncat netcat socat telnet ftp tftp lftp ping ping6 dig nslookup host whois traceroute
    mtr nmap aria2c http https xh gh glab aws gcloud az kubectl helm docker podman nerdctl openssl mail sendmail
    mutt rclone gsutil s3cmd psql mysql redis-cli mongosh heroku vercel netlify fly wscat
    """
)
"""They reach other machines or services."""

FETCHING = _names("wget scp sftp ftp tftp lftp aria2c rclone gsutil s3cmd")
"""Of those, what writes files of them here, whatever its options are."""

BECOMING = _names(
    """
    sudo doas su pkexec runuser run0 gosu
    """
)
"""They run a program as another user."""

GIT_READS = _names(
    """
    annotate blame cat-file check-attr check-ignore cherry count-objects describe diff diff-files diff-index diff-
    tree for-each-ref grep help log ls-files ls-remote ls-tree merge-base name-rev range-diff rev-list rev-parse
    shortlog show show-ref status var version whatchanged
    """
)
"""Commands of git that change nothing by themselves."""

GIT_NETWORK = _names(
    """
    archive clone fetch fetch-pack lfs ls-remote pull push remote request-pull send-email send-pack submodule svn
    """
)
"""Commands of git that reach another repository."""

INSTALLING = _names(
    """
    apt apt-get aptitude dpkg rpm dnf yum zypper pacman apk port snap flatpak composer nix nix-env nix-shell choco
    winget cpan cpanm npx pnpx bunx uvx easy_install corepack rustup nvm
    """
)
"""Programs that bring code of others, or may, whatever they are told."""

PACKAGES = {
    "pip": "install download wheel uninstall",
    "pip3": "install download wheel uninstall",
    "pip3.11": "install download wheel uninstall",
    "pip3.12": "install download wheel uninstall",
    "pip3.13": "install download wheel uninstall",
    "pipx": "install run inject upgrade",
    "uv": "add sync pip tool remove lock venv run",
    "poetry": "add install update remove lock",
    "conda": "install create update env remove",
    "mamba": "install create update",
    "npm": "install i ci add update up upgrade exec x rebuild link uninstall init create",
    "pnpm": "install i add update up dlx exec rebuild link remove create",
    "yarn": "install add up upgrade dlx remove create link",
    "bun": "install i add update x create remove",
    "brew": "install upgrade update reinstall tap uninstall",
    "gem": "install update uninstall",
    "bundle": "install update add",
    "bundler": "install update add",
    "cargo": "install add update fetch binstall",
    "go": "install get mod",
    "luarocks": "install",
    "stack": "install",
    "mvn": "install",
    "pyenv": "install",
    "asdf": "install",
    "cabal": "install update",
    "opam": "install update",
    "pod": "install update",
    "mix": "deps.get local.hex archive.install",
    "dart": "pub",
    "flutter": "pub",
    "deno": "install add cache",
    "dotnet": "add restore tool",
    "nuget": "install restore",
    **dict.fromkeys(INSTALLING, "*"),
}
"""The subcommands that bring code of others, whose scripts may run at once."""

PROJECT = _names(
    """
    make gmake ninja cmake bazel just task rake tox nox pytest py.test npm pnpm yarn bun cargo go gradle gradlew
    mvn ant sbt dotnet ctest meson invoke fab jest vitest mocha tsc eslint webpack vite turbo lerna bundle mix
    stack cabal swift xcodebuild poetry uv pre-commit phpunit
    """
)
"""They run what the files of the project say."""

CREDENTIALS = _names(
    """
    .env .env.* *.pem *.key *.p12 *.pfx *.keystore *.jks id_rsa* id_dsa* id_ecdsa* id_ed25519* .netrc _netrc
    .npmrc .pypirc .git-credentials .pgpass .my.cnf .htpasswd .vault-token credentials credentials.* secrets.*
    .ssh .aws .gnupg .kube .docker .azure gcloud shadow gshadow environ service-account*.json kubeconfig
    .bash_history .zsh_history
    """
)
"""Names of files and folders that hold secrets, as globs."""
NO_CREDENTIALS = _names(".env.example .env.sample .env.template .env.dist *.pub")
GUESSES = _names(
    """
    .env .netrc .npmrc .pypirc .git-credentials .ssh .aws .gnupg id_rsa id_ed25519 credentials shadow
    """
)
"""Some of them as they are: a pattern that fits one may have been written for it."""
