//! [`Hosts`]: network namespaces that are hosts to a launcher.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The number of hosts. Their addresses are `10.77.0.1` and so on.
const HOSTS: usize = 4;

/// Four hosts in a network of their own: namespaces with names of their own, joined by a bridge in
/// a fifth.
pub(crate) struct Hosts {
    /// What the names of the namespaces begin with.
    prefix: String,
    folder: tempfile::TempDir,
}

impl Hosts {
    /// Creates them. The names of the namespaces begin with that of the test.
    ///
    /// # Errors
    /// If this user may not, or there is no program `ip`.
    pub(crate) fn new(test: &str) -> io::Result<Hosts> {
        let prefix = format!("{test}{}", std::process::id());
        let hosts = Hosts { prefix, folder: tempfile::tempdir()? };
        let hub = hosts.name("hub");
        ip(&format!("netns add {hub}"))?;
        ip(&format!("-n {hub} link add bridge type bridge"))?;
        ip(&format!("-n {hub} link set bridge up"))?;
        for number in 1..=HOSTS {
            let host = hosts.name(number);
            ip(&format!("netns add {host}"))?;
            ip(&format!("-n {hub} link add to{number} type veth peer name eth0 netns {host}"))?;
            ip(&format!("-n {hub} link set to{number} master bridge up"))?;
            ip(&format!("-n {host} addr add 10.77.0.{number}/24 dev eth0"))?;
            ip(&format!("-n {host} link set eth0 up"))?;
            ip(&format!("-n {host} link set lo up"))?;
        }
        let script = format!(
            "#!/bin/sh\n\
             while [ \"${{1#-}}\" != \"$1\" ]; do shift; done\n\
             number=${{1##*.}}; shift\n\
             exec ip netns exec {}$number unshare -u sh -c \"hostname host$number; $*\"\n",
            hosts.name("")
        );
        std::fs::write(hosts.agent(), script)?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(hosts.agent(), mode)?;
        Ok(hosts)
    }

    /// Gives names addresses on all hosts, also to programs that run there.
    pub(crate) fn name_addresses(&self, names: &[(&str, &str)]) -> io::Result<()> {
        for host in self.names() {
            let folder = Path::new("/etc/netns").join(host);
            std::fs::create_dir_all(&folder)?;
            // Written in place: `ip netns exec` has mounted the file over that of the machine.
            let lines = names.iter().map(|(name, address)| format!("{address} {name}\n"));
            let lines: String = lines.collect();
            std::fs::write(folder.join("hosts"), format!("127.0.0.1 localhost\n{lines}"))?;
        }
        Ok(())
    }

    fn names(&self) -> impl Iterator<Item = String> {
        (1..=HOSTS).map(|number| self.name(number))
    }

    fn name(&self, suffix: impl std::fmt::Display) -> String {
        format!("{}-{suffix}", self.prefix)
    }

    /// Returns the program that starts a command on a host, as `ssh` would: `agent HOST COMMAND`.
    pub(crate) fn agent(&self) -> PathBuf {
        self.folder.path().join("agent")
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in self.names().chain([self.name("hub")]) {
            // What was not created is absent.
            let _ = ip(&format!("netns del {name}"));
            let _ = std::fs::remove_dir_all(Path::new("/etc/netns").join(name));
        }
    }
}

/// Runs `ip` with these arguments.
fn ip(arguments: &str) -> io::Result<()> {
    let mut command = Command::new("ip");
    command.args(arguments.split_ascii_whitespace()).stdin(Stdio::null());
    let output = command.output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "ip {arguments}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}
