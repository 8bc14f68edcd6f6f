//! [`KEYS`]: every key of a job file, with its flag and the kind of its values.

use pushpull_common::cluster::resolve::Resolver;

use super::byte_size::parse_byte_size;
use super::mode::{Replicas, on_loss, sparse_reduction, staleness};
use super::rule::{OPTIMIZERS, RateFor, RuleFor};
use super::schedule::ScheduleSetting;

/// A key of a job file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    pub(super) table: &'static str,
    pub(super) name: &'static str,
    /// The flag with the same meaning, without its hyphens.
    pub(super) flag: &'static str,
    pub(super) kind: Kind,
}

/// The values that a key accepts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// `true` or `false`.
    Switch,
    /// A whole number of at least this.
    Whole(u64),
    /// A number.
    Number,
    /// A number of bytes, or a text such as `"16G"`.
    Bytes,
    /// A whole number of this unit. The name without the unit accepts a text such as `"5s"`.
    Time(TimeUnit),
    /// A text that this function accepts.
    Text(fn(&str) -> Result<(), String>),
    /// A path of this machine.
    Path,
    /// A path, or a URL for which the program has a storage.
    Place,
    /// A list of texts, each of which this function accepts.
    Texts(fn(&str) -> Result<(), String>),
    /// A list of addresses, or one text in which commas separate them.
    Addresses,
}

/// The unit of a time, with which the name of its key ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimeUnit {
    Microseconds,
    Milliseconds,
    Hours,
}

impl TimeUnit {
    /// Returns the end of the name of a key with this unit.
    pub(super) const fn suffix(self) -> &'static str {
        match self {
            TimeUnit::Microseconds => "_us",
            TimeUnit::Milliseconds => "_ms",
            TimeUnit::Hours => "_hours",
        }
    }

    /// Returns the unit in microseconds.
    pub(super) const fn microseconds(self) -> u64 {
        match self {
            TimeUnit::Microseconds => 1,
            TimeUnit::Milliseconds => 1000,
            TimeUnit::Hours => 3_600_000_000,
        }
    }
}

impl Key {
    /// Returns the name under which a time is a text with its unit, such as `lease` for `lease_ms`.
    pub(super) fn name_of_text(&self) -> Option<&'static str> {
        match self.kind {
            Kind::Time(unit) => self.name.strip_suffix(unit.suffix()),
            _ => None,
        }
    }

    /// Returns whether the key has this name.
    pub(super) fn is_called(&self, name: &str) -> bool {
        self.name == name || self.name_of_text() == Some(name)
    }
}

/// Returns the key of a flag without its hyphens.
pub(super) fn key_of(flag: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.flag == flag)
}

/// The tables, in the order in which a job is printed.
pub(super) const TABLES: [&str; 11] = [
    "cluster",
    "network",
    "security",
    "storage",
    "checkpoints",
    "optimizer",
    "mode",
    "training",
    "functions",
    "data",
    "worker",
];

const MILLISECONDS: Kind = Kind::Time(TimeUnit::Milliseconds);
const MICROSECONDS: Kind = Kind::Time(TimeUnit::Microseconds);
const HOURS: Kind = Kind::Time(TimeUnit::Hours);
const COUNT: Kind = Kind::Whole(1);
const ANY_TEXT: Kind = Kind::Text(|_| Ok(()));

/// The keys, by table.
pub(super) const KEYS: &[Key] = &[
    key("cluster", "spec", "cluster", ANY_TEXT),
    key("cluster", "ps_hosts", "ps-hosts", Kind::Addresses),
    key("cluster", "worker_hosts", "worker-hosts", Kind::Addresses),
    key("cluster", "resolve", "resolve", Kind::Text(is::<Resolver>)),
    key("cluster", "base_port", "base-port", COUNT),
    key("cluster", "ps_service", "ps-service", ANY_TEXT),
    key("cluster", "num_ps", "num-ps", COUNT),
    key("cluster", "num_workers", "num-workers", COUNT),
    key("cluster", "rendezvous", "rendezvous", ANY_TEXT),
    key("cluster", "rendezvous_timeout_ms", "rendezvous-timeout-ms", MILLISECONDS),
    key("cluster", "elastic_workers", "elastic-workers", Kind::Switch),
    key("network", "listen", "listen", ANY_TEXT),
    key("network", "unix_socket", "unix-socket", Kind::Path),
    key("network", "no_shared_memory", "no-shared-memory", Kind::Switch),
    key("network", "insecure", "insecure", Kind::Switch),
    key("network", "handshake_timeout_ms", "handshake-timeout-ms", MILLISECONDS),
    key("network", "waiting_connections_max", "waiting-connections-max", COUNT),
    key("network", "connections_max", "connections-max", COUNT),
    key("network", "busy_poll_us", "busy-poll-us", MICROSECONDS),
    key("security", "tls_cert", "tls-cert", Kind::Path),
    key("security", "tls_key", "tls-key", Kind::Path),
    key("security", "tls_ca", "tls-ca", Kind::Path),
    key("security", "tokens", "tokens", Kind::Path),
    key("storage", "shards", "shards", COUNT),
    key("storage", "state_dir", "state-dir", Kind::Path),
    key("storage", "bytes_max", "bytes-max", Kind::Bytes),
    key("storage", "group_writable", "group-writable", Kind::Switch),
    key("storage", "durability", "durability", Kind::Text(|text| one_of(text, &DURABILITIES))),
    key("storage", "integrity_full", "integrity-full", Kind::Switch),
    key("storage", "inbox_pushes", "inbox-pushes", COUNT),
    key("storage", "pin_bytes_max", "pin-bytes-max", Kind::Bytes),
    key("checkpoints", "checkpoint_dir", "checkpoint-dir", Kind::Place),
    key("checkpoints", "checkpoint_every_ms", "checkpoint-every-ms", MILLISECONDS),
    key("checkpoints", "max_to_keep", "max-to-keep", Kind::Whole(0)),
    key("checkpoints", "keep_every_hours", "keep-every-hours", HOURS),
    key(
        "checkpoints",
        "on_save_failure",
        "on-save-failure",
        Kind::Text(|text| one_of(text, &["continue", "stop"])),
    ),
    key("optimizer", "name", "optimizer", Kind::Text(|text| one_of(text, &OPTIMIZERS))),
    key("optimizer", "learning_rate", "learning-rate", Kind::Number),
    key("optimizer", "schedule", "schedule", Kind::Text(is::<ScheduleSetting>)),
    key("optimizer", "warm_up", "warm-up", Kind::Whole(0)),
    key("optimizer", "momentum", "momentum", Kind::Number),
    key("optimizer", "rho", "rho", Kind::Number),
    key("optimizer", "centered", "centered", Kind::Switch),
    key("optimizer", "beta1", "beta1", Kind::Number),
    key("optimizer", "beta2", "beta2", Kind::Number),
    key("optimizer", "epsilon", "epsilon", Kind::Number),
    key("optimizer", "epsilon_after_correction", "epsilon-after-correction", Kind::Switch),
    key("optimizer", "row_counts", "row-counts", Kind::Switch),
    key("optimizer", "weight_decay", "weight-decay", Kind::Number),
    key("optimizer", "initial_accumulator", "initial-accumulator", Kind::Number),
    key("optimizer", "learning_rate_power", "learning-rate-power", Kind::Number),
    key("optimizer", "l1", "l1", Kind::Number),
    key("optimizer", "l2", "l2", Kind::Number),
    key("optimizer", "l2_shrinkage", "l2-shrinkage", Kind::Number),
    key("optimizer", "beta", "beta", Kind::Number),
    key("optimizer", "optimizer_for", "optimizer-for", Kind::Texts(is::<RuleFor>)),
    key("optimizer", "rate_for", "rate-for", Kind::Texts(is::<RateFor>)),
    key("mode", "synchronous", "synchronous", Kind::Text(is::<Replicas>)),
    key("mode", "issync", "issync", Kind::Whole(0)),
    key("mode", "on_loss", "on-loss", Kind::Text(|text| on_loss(text).map(drop))),
    key("mode", "join_timeout_ms", "join-timeout-ms", MILLISECONDS),
    key("mode", "deterministic", "deterministic", Kind::Switch),
    key("mode", "clip_by_global_norm", "clip-by-global-norm", Kind::Number),
    key(
        "mode",
        "sparse_reduction",
        "sparse-reduction",
        Kind::Text(|text| sparse_reduction(text).map(drop)),
    ),
    key("mode", "staleness", "staleness", Kind::Text(|text| staleness(text).map(drop))),
    key("mode", "wait_ahead", "wait-ahead", COUNT),
    key("mode", "reject_older", "reject-older", Kind::Whole(0)),
    key("training", "last_step", "last-step", COUNT),
    key("training", "lease_ms", "lease-ms", MILLISECONDS),
    key("training", "effects_kept_hours", "effects-kept-hours", HOURS),
    key("training", "token_timeout_ms", "token-timeout-ms", MILLISECONDS),
    key("training", "non_finite", "non-finite", Kind::Text(|text| one_of(text, &NON_FINITE))),
    key("training", "exit_when_done", "exit-when-done", Kind::Switch),
    key("training", "exit_grace_ms", "exit-grace-ms", MILLISECONDS),
    key("functions", "no_functions", "no-functions", Kind::Switch),
    key("functions", "cuda", "cuda", Kind::Text(|text| one_of(text, &["auto", "off"]))),
    key("data", "dir", "data", Kind::Place),
    key("data", "batch", "batch", COUNT),
    key("data", "epochs", "epochs", COUNT),
    key("data", "seed", "seed", Kind::Whole(0)),
    key("worker", "program", "program", ANY_TEXT),
    key("worker", "args", "args", Kind::Texts(|_| Ok(()))),
];

/// The values of `durability`.
pub(super) const DURABILITIES: [&str; 2] = ["process", "power"];

/// The values of `non_finite`.
pub(super) const NON_FINITE: [&str; 3] = ["reject", "count", "allow"];

const fn key(table: &'static str, name: &'static str, flag: &'static str, kind: Kind) -> Key {
    Key { table, name, flag, kind }
}

/// Checks that a text is one of these.
fn one_of(text: &str, all: &[&str]) -> Result<(), String> {
    match all.contains(&text) {
        true => Ok(()),
        false => Err(format!("expected one of {}", all.join(", "))),
    }
}

/// Checks that a text is a value of this type.
fn is<T: std::str::FromStr<Err: ToString>>(text: &str) -> Result<(), String> {
    text.parse::<T>().map(drop).map_err(|error| error.to_string())
}

/// Checks the text of a number of bytes.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    parse_byte_size(text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_key_has_a_name_and_a_flag_of_its_own_in_a_known_table() {
        let mut names = BTreeSet::new();
        let mut flags = BTreeSet::new();
        for key in KEYS {
            assert!(TABLES.contains(&key.table), "{key:?}");
            assert!(flags.insert(key.flag), "{key:?}");
            for name in [Some(key.name), key.name_of_text()].into_iter().flatten() {
                assert!(names.insert((key.table, name)), "{key:?}");
            }
            if let Kind::Time(_) = key.kind {
                assert!(key.name_of_text().is_some(), "{key:?}");
            }
        }
    }
}
