//! Settings of a storage: credentials, endpoints, deadlines and sizes.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::fault::RemoteError;
use crate::url::{RemoteScheme, RemoteUrl};

/// The settings of a storage.
///
/// Credentials and endpoints have the names that the tools of each storage read from the
/// environment, such as `AWS_ACCESS_KEY_ID`: see [`RemoteOptions::names`]. A `Debug` of these
/// options displays the names without the values.
#[derive(Clone)]
#[non_exhaustive]
pub struct RemoteOptions {
    settings: BTreeMap<String, String>,
    pub(crate) connect_timeout: Duration,
    pub(crate) request_timeout: Duration,
    pub(crate) operation_timeout: Duration,
    pub(crate) claim_lease: Duration,
    pub(crate) part_bytes: usize,
    pub(crate) parts_in_flight: usize,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        RemoteOptions {
            settings: BTreeMap::new(),
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(30),
            operation_timeout: Duration::from_secs(120),
            claim_lease: Duration::from_secs(30),
            part_bytes: 16 << 20,
            parts_in_flight: 4,
        }
    }
}

impl RemoteOptions {
    /// Creates options without credentials.
    pub fn new() -> RemoteOptions {
        RemoteOptions::default()
    }

    /// Creates options with the values that `lookup` has for [`RemoteOptions::names`]. A program
    /// passes `|name| std::env::var(name).ok()`.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> RemoteOptions {
        let names = RemoteScheme::ALL.into_iter().flat_map(RemoteOptions::names);
        let found = names.filter_map(|name| Some((*name, lookup(name)?)));
        found.fold(RemoteOptions::new(), |options, (name, value)| options.value(name, value))
    }

    /// Returns the names of the settings of a kind of storage.
    pub fn names(scheme: RemoteScheme) -> &'static [&'static str] {
        match scheme {
            RemoteScheme::S3 => S3_NAMES,
            RemoteScheme::Gs => GS_NAMES,
            RemoteScheme::Az => AZ_NAMES,
            RemoteScheme::Hdfs => HDFS_NAMES,
        }
    }

    /// Sets a setting of this name. An empty value is none.
    #[must_use]
    pub fn value(mut self, name: impl Into<String>, value: impl Into<String>) -> RemoteOptions {
        let (name, value) = (name.into(), value.into());
        match value.is_empty() {
            true => drop(self.settings.remove(&name)),
            false => drop(self.settings.insert(name, value)),
        }
        self
    }

    /// Sets the longest time for a connection to open. Default 5 s.
    #[must_use]
    pub fn connect_timeout(mut self, limit: Duration) -> RemoteOptions {
        self.connect_timeout = limit;
        self
    }

    /// Sets the longest time for one request; after that it is sent again, if it may be. Default
    /// 30 s.
    #[must_use]
    pub fn request_timeout(mut self, limit: Duration) -> RemoteOptions {
        self.request_timeout = limit;
        self
    }

    /// Sets the longest time for one operation with all its retries, such as a read, or one part of
    /// an upload. Default 120 s.
    #[must_use]
    pub fn operation_timeout(mut self, limit: Duration) -> RemoteOptions {
        self.operation_timeout = limit;
        self
    }

    /// Sets the time after which the claim of a process that renews it no more is taken over.
    /// Default 30 s. A process that saves renews its claim three times in it.
    #[must_use]
    pub fn claim_lease(mut self, lease: Duration) -> RemoteOptions {
        self.claim_lease = lease;
        self
    }

    /// Sets the size of the parts in which a file is uploaded. Default 16 MiB, at least 5 MiB. A
    /// file has at most 10,000 parts. An upload holds at most five of them in memory.
    #[must_use]
    pub fn part_bytes(mut self, bytes: usize) -> RemoteOptions {
        self.part_bytes = bytes;
        self
    }

    /// Returns the set settings of a kind of storage.
    #[cfg_attr(not(any(feature = "cloud", feature = "hdfs")), expect(dead_code))]
    pub(crate) fn settings(
        &self,
        scheme: RemoteScheme,
    ) -> impl Iterator<Item = (&'static str, &str)> {
        let names = RemoteOptions::names(scheme).iter();
        names.filter_map(|name| Some((*name, self.settings.get(*name)?.as_str())))
    }

    /// Checks the durations and sizes, and that every setting has a known name.
    pub(crate) fn check(&self, url: &RemoteUrl) -> Result<(), RemoteError> {
        let fault = |reason: String| RemoteError::Setting { url: url.to_string(), reason };
        let known: Vec<&str> =
            RemoteScheme::ALL.into_iter().flat_map(RemoteOptions::names).copied().collect();
        if let Some(name) = self.settings.keys().find(|name| !known.contains(&name.as_str())) {
            return Err(fault(format!("there is no setting {name:?}")));
        }
        for (name, value) in [
            ("connect timeout", self.connect_timeout),
            ("request timeout", self.request_timeout),
            ("operation timeout", self.operation_timeout),
            ("claim lease", self.claim_lease),
        ] {
            if !(DURATION_MIN..=DURATION_MAX).contains(&value) {
                return Err(fault(format!("the {name} is {value:?}, not 10 ms to 1 h")));
            }
        }
        if !(PART_BYTES_MIN..=PART_BYTES_MAX).contains(&self.part_bytes) {
            let bytes = self.part_bytes;
            return Err(fault(format!("a part has {bytes} bytes, not 5 MiB to 1 GiB")));
        }
        Ok(())
    }
}

impl fmt::Debug for RemoteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteOptions")
            .field("settings", &self.settings.keys().collect::<Vec<_>>())
            .field("connect_timeout", &self.connect_timeout)
            .field("request_timeout", &self.request_timeout)
            .field("operation_timeout", &self.operation_timeout)
            .field("claim_lease", &self.claim_lease)
            .field("part_bytes", &self.part_bytes)
            .finish_non_exhaustive()
    }
}

const DURATION_MIN: Duration = Duration::from_millis(10);
const DURATION_MAX: Duration = Duration::from_secs(3600);
/// The least size of a part of S3, but for the last one.
const PART_BYTES_MIN: usize = 5 << 20;
const PART_BYTES_MAX: usize = 1 << 30;

const S3_NAMES: &[&str] = &[
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL_STS",
    "AWS_ALLOW_HTTP",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_METADATA_ENDPOINT",
    "AWS_SKIP_SIGNATURE",
    "AWS_REQUEST_PAYER",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SSE_KMS_KEY_ID",
];

const GS_NAMES: &[&str] = &[
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_BASE_URL",
    "GOOGLE_SKIP_SIGNATURE",
    "GOOGLE_ALLOW_HTTP",
];

const AZ_NAMES: &[&str] = &[
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_STORAGE_USE_EMULATOR",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_TENANT_ID",
    "AZURE_AUTHORITY_HOST",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_ALLOW_HTTP",
];

const HDFS_NAMES: &[&str] = &["HADOOP_CONF_DIR", "HADOOP_USER_NAME"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debug_has_no_secrets() {
        let options = RemoteOptions::from_lookup(|name| {
            (name == "AWS_SECRET_ACCESS_KEY").then(|| "hunter2".to_owned())
        });
        let text = format!("{options:?}");
        assert!(text.contains("AWS_SECRET_ACCESS_KEY") && !text.contains("hunter2"), "{text}");
    }

    #[test]
    fn wrong_settings_are_named() {
        let url: RemoteUrl = "s3://b/run".parse().unwrap();
        for (options, expected) in [
            (RemoteOptions::new().value("AWS_KEY", "x"), "there is no setting \"AWS_KEY\""),
            (RemoteOptions::new().part_bytes(1), "a part has 1 bytes, not 5 MiB to 1 GiB"),
            (
                RemoteOptions::new().claim_lease(Duration::ZERO),
                "the claim lease is 0ns, not 10 ms to 1 h",
            ),
        ] {
            let error = options.check(&url).unwrap_err().to_string();
            assert_eq!(error, format!("cannot use \"s3://b/run\": {expected}"));
        }
        assert!(RemoteOptions::new().value("AWS_REGION", "").check(&url).is_ok());
    }
}
