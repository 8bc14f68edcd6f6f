//! Builds the configuration of a server from the settings.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::TaskId;
use pushpull_ps::checkpoint::{CheckpointStorage, LocalDirectory, Retention};
use pushpull_ps::security::{CredentialFiles, Credentials};
use pushpull_ps::{Checkpoints, Durability, Network, NonFinite, OnSaveFailure, PsConfig, Storage};

use super::error::JobError;
use super::rule::{self, RateFor, RuleFor};
use super::settings::Settings;

/// Settings that have an effect only beside one of others.
const NEEDS: [(&str, &[&str]); 10] = [
    ("tls-cert", &["tls-key"]),
    ("tls-key", &["tls-cert"]),
    ("durability", &["state-dir"]),
    ("integrity-full", &["state-dir"]),
    ("group-writable", &["state-dir", "checkpoint-dir"]),
    ("checkpoint-every-ms", &["checkpoint-dir"]),
    ("max-to-keep", &["checkpoint-dir"]),
    ("keep-every-hours", &["checkpoint-dir"]),
    ("on-save-failure", &["checkpoint-dir"]),
    ("exit-grace-ms", &["exit-when-done"]),
];

/// The time that `exit-when-done` waits for another worker where none is set.
const EXIT_GRACE_MS: u64 = 10_000;

impl Settings {
    /// Returns the configuration of a ps task, without its checkpoints.
    ///
    /// # Errors
    /// If a value is invalid, contradicts another, or has no effect.
    pub fn ps_config(&self, cluster: ClusterSpec, task: TaskId) -> Result<PsConfig, JobError> {
        let unmet = NEEDS.iter().find(|(flag, needs)| {
            self.is_given(flag) && !needs.iter().any(|needed| self.is_given(needed))
        });
        if let Some((flag, needs)) = unmet {
            let needs: Vec<_> = needs.iter().map(|needed| format!("--{needed}")).collect();
            let reason = format!("it has no effect without {}", needs.join(" or "));
            return Err(self.fault(flag, reason));
        }
        let mode = self.mode(&cluster)?;
        let storage = self.storage(task.index)?;
        let mut config = PsConfig::new(cluster, task, rule::optimizer(self)?);
        for text in self.texts("optimizer-for") {
            let RuleFor { names, optimizer } =
                text.parse().map_err(|error| self.fault_of("optimizer-for", text, error))?;
            config = config.optimizer_for(names, optimizer);
        }
        for text in self.texts("rate-for") {
            let RateFor { names, factor } =
                text.parse().map_err(|error| self.fault_of("rate-for", text, error))?;
            config = config.rate_for(names, factor);
        }
        if let Some(shards) = self.value("shards")? {
            config = config.shards(shards);
        }
        if let Some(pushes) = self.value("inbox-pushes")? {
            config = config.inbox_pushes(pushes);
        }
        let config = config.elastic_workers(self.is_given("elastic-workers"));
        self.training(config.mode(mode).storage(storage).network(self.network()?))
    }

    /// Returns the error of one of several values of a setting.
    fn fault_of(&self, flag: &str, text: &str, error: String) -> JobError {
        match self.texts(flag).len() {
            0 | 1 => self.fault(flag, error),
            _ => self.fault(flag, format_args!("{text:?}: {error}")),
        }
    }

    /// Returns the credentials of a task; `None` if no file is set.
    ///
    /// # Errors
    /// If a file cannot be used.
    pub fn credentials(&self, task: &TaskId) -> Result<Option<Credentials>, JobError> {
        let path = |flag: &str| {
            let path = self.path(flag, task.index)?;
            Some(PathBuf::from(path.to_string_lossy().replace("{job}", &task.job)))
        };
        let mut files = CredentialFiles::new();
        if let (Some(certificate), Some(key)) = (path("tls-cert"), path("tls-key")) {
            files = files.certificate(certificate, key);
        }
        if let Some(authority) = path("tls-ca") {
            files = files.authority(authority);
        }
        if let Some(tokens) = path("tokens") {
            files = files.tokens(tokens);
        }
        if files.is_empty() {
            return Ok(None);
        }
        let flags = ["tls-cert", "tls-key", "tls-ca", "tokens"];
        files.open().map(Some).map_err(|error| {
            let at_fault =
                |flag: &&str| error.path().is_some() && path(flag).as_deref() == error.path();
            let flag = flags.into_iter().find(at_fault).unwrap_or("tokens");
            self.fault(flag, pushpull_common::error::Chain(&error))
        })
    }

    fn network(&self) -> Result<Network, JobError> {
        let mut network = Network::default().shared_memory(!self.is_given("no-shared-memory"));
        if let Some(millis) = self.value("handshake-timeout-ms")? {
            network = network.handshake_timeout(Duration::from_millis(millis));
        }
        if let Some(connections) = self.value("waiting-connections-max")? {
            network = network.waiting_connections_max(connections);
        }
        if let Some(connections) = self.value("connections-max")? {
            network = network.connections_max(connections);
        }
        if let Some(micros) = self.value("busy-poll-us")? {
            network = network.busy_poll(Duration::from_micros(micros));
        }
        Ok(network)
    }

    fn storage(&self, task: u32) -> Result<Storage, JobError> {
        let storage = match self.path("state-dir", task) {
            Some(state) => Storage::directory(state),
            None => Storage::memory(),
        };
        let mut storage = storage
            .group_writable(self.is_given("group-writable"))
            .integrity_full(self.is_given("integrity-full"))
            .durability(match self.text("durability") {
                None | Some("process") => Durability::Process,
                Some("power") => Durability::Power,
                Some(_) => return Err(self.fault("durability", "expected process or power")),
            });
        if let Some(bytes) = self.read("bytes-max", super::keys::bytes)? {
            storage = storage.bytes_max(bytes);
        }
        if let Some(bytes) = self.read("pin-bytes-max", super::keys::bytes)? {
            storage = storage.pin_bytes_max(bytes);
        }
        Ok(storage)
    }

    fn training(&self, mut config: PsConfig) -> Result<PsConfig, JobError> {
        if let Some(millis) = self.value("lease-ms")? {
            config = config.lease(Duration::from_millis(millis));
        }
        if let Some(hours) = self.value::<u32>("effects-kept-hours")? {
            config = config.effects_kept(Duration::from_secs(3600 * u64::from(hours)));
        }
        if let Some(millis) = self.value("token-timeout-ms")? {
            config =
                config.token_timeout(Some(Duration::from_millis(millis)).filter(|_| millis > 0));
        }
        config = config.non_finite(match self.text("non-finite") {
            None | Some("reject") => NonFinite::Reject,
            Some("count") => NonFinite::Count,
            Some("allow") => NonFinite::Allow,
            Some(_) => return Err(self.fault("non-finite", "expected reject, count or allow")),
        });
        if let Some(step) = self.value("last-step")? {
            config = config.last_step(step);
        }
        if self.is_given("exit-when-done") {
            let millis = self.value("exit-grace-ms")?.unwrap_or(EXIT_GRACE_MS);
            config = config.exit_when_done(Duration::from_millis(millis));
        }
        Ok(config)
    }

    /// Returns the checkpoints in a storage: how often they are saved and which are kept.
    ///
    /// # Errors
    /// If a value is invalid or has no effect.
    pub fn checkpoints(
        &self,
        storage: Arc<dyn CheckpointStorage>,
    ) -> Result<Checkpoints, JobError> {
        let mut retention = Retention::default();
        if let Some(count) = self.value("max-to-keep")? {
            retention.max_to_keep = count;
        }
        if let Some(hours) = self.value("keep-every-hours")? {
            if retention.max_to_keep == 0 && hours > 0 {
                let reason = "it has no effect, --max-to-keep 0 keeps all checkpoints";
                return Err(self.fault("keep-every-hours", reason));
            }
            retention.keep_every_hours = hours;
        }
        let checkpoints = Checkpoints::shared(storage).retention(retention);
        let checkpoints = checkpoints.on_failure(match self.text("on-save-failure") {
            None | Some("continue") => OnSaveFailure::Continue,
            Some("stop") => OnSaveFailure::Stop,
            Some(_) => return Err(self.fault("on-save-failure", "expected continue or stop")),
        });
        Ok(match self.value("checkpoint-every-ms")? {
            None | Some(0) => checkpoints,
            Some(millis) => checkpoints.every(Duration::from_millis(millis)),
        })
    }

    /// Returns the checkpoints in a directory of this machine; `None` if no directory is set.
    /// Creates the directory.
    ///
    /// # Errors
    /// If the directory cannot be used, or a value is invalid.
    pub fn local_checkpoints(&self) -> Result<Option<Checkpoints>, JobError> {
        let Some(directory) = self.text("checkpoint-dir") else { return Ok(None) };
        let storage = match self.is_given("group-writable") {
            true => LocalDirectory::create_for_group(directory),
            false => LocalDirectory::create(directory),
        };
        let chain = |error| self.fault("checkpoint-dir", pushpull_common::error::Chain(&error));
        self.checkpoints(Arc::new(storage.map_err(chain)?)).map(Some)
    }
}
