//! Lines about the machines that reach a task, and those that do not.

use std::net::{IpAddr, SocketAddr};

use pushpull::security::Credentials;

use super::options::FlagAddress;

/// Returns the line to print if a task listens on loopback although the cluster has a name for it:
/// systems such as Debian map the machine's own name to 127.0.1.1. `at` is the address in the
/// cluster, `bound` the one that the task listens on.
pub(crate) fn loopback_hint(at: FlagAddress<'_>, bound: &str) -> Option<String> {
    let bound: SocketAddr =
        bound.parse().ok().filter(|bound: &SocketAddr| bound.ip().is_loopback())?;
    let (host, port) = at.address.rsplit_once(':')?;
    let is_loopback_on_purpose =
        host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok() || host == "localhost";
    (at.flag != "--listen" && !is_loopback_on_purpose).then(|| {
        let ip = bound.ip();
        format!(
            "{host} is {ip} on this machine, which no other machine reaches: for those, give \
             --listen 0.0.0.0:{port} with --tls-cert and --tokens, or --insecure"
        )
    })
}

/// Returns the advice for a task that cannot listen on its address in the cluster, because that is
/// none of this machine's.
pub(crate) fn elsewhere_advice(named: &str) -> String {
    let port = named.rsplit_once(':').map_or("PORT", |(_, port)| port);
    format!("give --listen 0.0.0.0:{port} --insecure, if others reach this task there all the same")
}

/// Returns the line about who can do this without proving who they are; `None` if nobody can whom the
/// owner of the task does not expect.
pub(crate) fn access_line(
    bound: &str,
    can: &str,
    insecure: bool,
    credentials: Option<&Credentials>,
) -> Option<String> {
    let identifies = credentials.is_some_and(Credentials::identify_clients);
    let encrypts = credentials.is_some_and(Credentials::encrypt);
    let ip = bound.parse::<SocketAddr>().map(|bound| bound.ip().to_canonical());
    let is_local = ip.as_ref().map_or(bound.starts_with("unix:"), IpAddr::is_loopback);
    match (is_local, insecure) {
        (true, true) => Some(format!("--insecure has no effect: no other machine reaches {bound}")),
        (true, false) if ip.is_err() || identifies => None,
        (true, false) => Some(format!(
            "every user of this machine can connect to {bound} and {can}: --tokens tells whom to let in"
        )),
        (false, true) if identifies && !encrypts => Some(format!(
            "insecure: whoever is on the way to {bound} can read and change what is sent"
        )),
        (false, true) if !identifies => {
            Some(format!("insecure: every machine that reaches {bound} can {can}"))
        }
        (false, _) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use pushpull::security::CredentialFiles;

    use super::*;

    #[test]
    fn a_task_tells_who_reaches_it() {
        let line = |address: &str, insecure| access_line(address, "call", insecure, None);
        for address in ["127.0.0.1:1", "127.0.1.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            let told = format!("--insecure has no effect: no other machine reaches {address}");
            assert_eq!(line(address, true), Some(told));
            let told = format!("every user of this machine can connect to {address} and call: ");
            assert!(line(address, false).unwrap().starts_with(&told));
        }
        assert_eq!(line("unix:/a", false), None);
        assert!(line("unix:/a", true).unwrap().starts_with("--insecure has no effect"));
        for address in ["0.0.0.0:1", "10.0.0.1:1", "[::]:1"] {
            let told = format!("insecure: every machine that reaches {address} can call");
            assert_eq!(line(address, true), Some(told));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, format!("token a {} roles=worker", "00".repeat(16))).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let tokens = CredentialFiles::new().tokens(path).open().unwrap();
        let line = |address: &str, insecure| access_line(address, "call", insecure, Some(&tokens));
        assert_eq!(line("127.0.0.1:1", false), None);
        let told = line("10.0.0.1:1", true).unwrap();
        assert_eq!(
            told,
            "insecure: whoever is on the way to 10.0.0.1:1 can read and change what is sent"
        );
    }

    #[test]
    fn an_own_name_that_means_loopback_is_told() {
        let hint = |address, bound| {
            loopback_hint(FlagAddress { flag: "--ps-hosts", address, credentials: None }, bound)
        };
        let said = hint("myhost:6106", "127.0.1.1:6106").unwrap();
        assert!(said.contains("myhost is 127.0.1.1") && said.contains("--listen 0.0.0.0:6106"));
        assert!(hint("myhost:1", "[::1]:1").is_some());
        for (named, bound) in [
            ("myhost:1", "10.0.0.1:1"),
            ("localhost:1", "127.0.0.1:1"),
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("[::1]:1", "[::1]:1"),
            ("unix:/a", "unix:/a"),
        ] {
            assert_eq!(hint(named, bound), None, "{named}");
        }
        let asked = FlagAddress { flag: "--listen", address: "myhost:1", credentials: None };
        assert_eq!(loopback_hint(asked, "127.0.1.1:1"), None, "it was asked for");
        assert!(elsewhere_advice("ps-0.svc:6106").contains("--listen 0.0.0.0:6106"));
    }
}
