//! Clients of the object stores: their HTTP, their retries and their settings.

use std::sync::Arc;
use std::time::Duration;

use object_store::client::{HttpClient, HttpConnector};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use rustls_platform_verifier::BuilderVerifierExt;

use crate::bucket::SharedBucket;
use crate::fault::{RemoteError, one_line};
use crate::options::RemoteOptions;
use crate::url::{RemoteScheme, RemoteUrl};

/// Makes the client of an object store. Sends nothing.
pub(crate) fn open(url: &RemoteUrl, options: &RemoteOptions) -> Result<SharedBucket, RemoteError> {
    let fault = |reason: String| RemoteError::Setting { url: url.to_string(), reason };
    match url.scheme() {
        #[cfg(feature = "s3")]
        RemoteScheme::S3 => open_s3(url, options).map_err(fault),
        #[cfg(feature = "gs")]
        RemoteScheme::Gs => open_gs(url, options).map_err(fault),
        #[cfg(feature = "az")]
        RemoteScheme::Az => open_az(url, options).map_err(fault),
        scheme => Err(fault(format!("{} is no object store of this program", scheme.name()))),
    }
}

/// Sets the settings that a builder of the store parses, and builds it.
macro_rules! build {
    ($builder:expr, $options:expr, $scheme:expr) => {{
        let mut builder = $builder
            .with_http_connector(Connector::of($options, $scheme))
            .with_client_options(ClientOptions::new().with_allow_http(true))
            .with_retry(retries($options));
        for (name, value) in $options.settings($scheme) {
            if is_client_setting(name) {
                continue;
            }
            let key = name.to_ascii_lowercase().parse();
            let key = key.map_err(|_| format!("there is no setting {name:?}"))?;
            builder = builder.with_config(key, value);
        }
        // A wrong value of a setting is an error of the store, which may display it.
        builder.build().map_err(|error| redacted(&one_line(&error), $options, $scheme))?
    }};
}

#[cfg(feature = "s3")]
fn open_s3(url: &RemoteUrl, options: &RemoteOptions) -> Result<SharedBucket, String> {
    use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
    let builder = AmazonS3Builder::new()
        .with_bucket_name(url.authority())
        .with_conditional_put(S3ConditionalPut::ETagMatch);
    Ok(Arc::new(build!(builder, options, RemoteScheme::S3)))
}

#[cfg(feature = "gs")]
fn open_gs(url: &RemoteUrl, options: &RemoteOptions) -> Result<SharedBucket, String> {
    use object_store::gcp::GoogleCloudStorageBuilder;
    let builder = GoogleCloudStorageBuilder::new().with_bucket_name(url.authority());
    Ok(Arc::new(build!(builder, options, RemoteScheme::Gs)))
}

#[cfg(feature = "az")]
fn open_az(url: &RemoteUrl, options: &RemoteOptions) -> Result<SharedBucket, String> {
    use object_store::azure::MicrosoftAzureBuilder;
    let builder = MicrosoftAzureBuilder::new().with_container_name(url.authority());
    Ok(Arc::new(build!(builder, options, RemoteScheme::Az)))
}

/// Returns whether a setting is one of the HTTP client.
fn is_client_setting(name: &str) -> bool {
    name.ends_with("_ALLOW_HTTP")
}

/// Returns whether the settings allow plain HTTP.
fn allows_http(options: &RemoteOptions, scheme: RemoteScheme) -> bool {
    options.settings(scheme).any(|(name, value)| {
        is_client_setting(name) && matches!(value, "true" | "1" | "yes" | "TRUE" | "True")
    })
}

fn retries(options: &RemoteOptions) -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(3),
            base: 2.0,
        },
        max_retries: RETRIES_MAX,
        // The cause of the last failure is told before the caller stops waiting.
        retry_timeout: options.operation_timeout.mul_f64(0.75),
    }
}

/// About 12 seconds of refused connections.
const RETRIES_MAX: usize = 8;

/// Replaces the values of all settings in a text, each of which may be a secret.
fn redacted(text: &str, options: &RemoteOptions, scheme: RemoteScheme) -> String {
    let long = options.settings(scheme).filter(|(_, value)| value.len() >= SECRET_BYTES_MIN);
    long.fold(text.to_owned(), |text, (name, value)| text.replace(value, &format!("<{name}>")))
}

/// Shorter values, such as `true`, are parts of other words.
const SECRET_BYTES_MIN: usize = 6;

/// Makes HTTP clients with TLS by ring and the certificates of the machine. No provider of TLS is
/// installed for the process, and no proxy is taken from the environment.
#[derive(Debug)]
struct Connector {
    connect_timeout: Duration,
    request_timeout: Duration,
    allows_http: bool,
}

impl Connector {
    fn of(options: &RemoteOptions, scheme: RemoteScheme) -> Connector {
        Connector {
            connect_timeout: options.connect_timeout,
            request_timeout: options.request_timeout,
            allows_http: allows_http(options, scheme),
        }
    }

    fn client(&self) -> Result<reqwest::Client, Box<dyn std::error::Error + Send + Sync>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_platform_verifier()?
            .with_no_client_auth();
        Ok(reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .no_proxy()
            // Plain HTTP sends the model in the clear, so it is asked for by a setting.
            .https_only(!self.allows_http)
            .connect_timeout(self.connect_timeout)
            .timeout(self.request_timeout)
            .user_agent(concat!("pushpull/", env!("CARGO_PKG_VERSION")))
            // One connection a request, as many as are under way: no stream stalls another.
            .http1_only()
            .build()?)
    }
}

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        match self.client() {
            Ok(client) => Ok(HttpClient::new(client)),
            Err(source) => Err(object_store::Error::Generic { store: "HTTP", source }),
        }
    }
}
