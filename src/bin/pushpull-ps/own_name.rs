//! Lines about the machines that reach a task, and those that do not.

use std::net::{IpAddr, SocketAddr};

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
             --listen 0.0.0.0:{port} --insecure"
        )
    })
}

/// Returns the advice for a task that cannot listen on its address in the cluster, because that is
/// none of this machine's.
pub(crate) fn elsewhere_advice(named: &str) -> String {
    let port = named.rsplit_once(':').map_or("PORT", |(_, port)| port);
    format!("give --listen 0.0.0.0:{port} --insecure, if others reach this task there all the same")
}

/// Returns the line of a task with `--insecure`: which machines can do this.
pub(crate) fn insecure_line(bound: &str, can: &str) -> String {
    let ip = bound.parse::<SocketAddr>().map(|bound| bound.ip().to_canonical());
    match ip.map_or(bound.starts_with("unix:"), |ip| ip.is_loopback()) {
        true => format!("--insecure has no effect: no other machine reaches {bound}"),
        false => format!("insecure: every machine that reaches {bound} can {can}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_insecure_task_tells_who_reaches_it() {
        for address in ["127.0.0.1:1", "127.0.1.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "unix:/a"]
        {
            let line = insecure_line(address, "change the variables");
            assert_eq!(
                line,
                format!("--insecure has no effect: no other machine reaches {address}")
            );
        }
        for address in ["0.0.0.0:1", "10.0.0.1:1", "[::]:1"] {
            let line = insecure_line(address, "call the functions");
            assert!(line.ends_with(&format!("that reaches {address} can call the functions")));
        }
    }

    #[test]
    fn an_own_name_that_means_loopback_is_told() {
        let hint =
            |address, bound| loopback_hint(FlagAddress { flag: "--ps-hosts", address }, bound);
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
        let asked = FlagAddress { flag: "--listen", address: "myhost:1" };
        assert_eq!(loopback_hint(asked, "127.0.1.1:1"), None, "it was asked for");
        assert!(elsewhere_advice("ps-0.svc:6106").contains("--listen 0.0.0.0:6106"));
    }
}
