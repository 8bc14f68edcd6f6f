//! Blocking forms of the client, for threads without an async runtime.

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::TaskId;
use pushpull_common::variable::VariableSpec;
use pushpull_worker::InitialValues;

use super::block_on::block_on;
use super::call::Call;
use super::client;
use super::client_config::ClientConfig;
use super::description::Description;
use super::error::ServiceError;
use super::kept::Kept;
use super::outputs::Outputs;
use super::value::Value;

/// A [`client::Client`] with blocking operations.
#[derive(Debug)]
pub struct Client {
    inner: client::Client,
}

impl Client {
    /// Blocking form of [`client::Client::connect`].
    ///
    /// # Errors
    /// The errors of [`client::Client::connect`].
    pub fn connect(target: &str) -> Result<Client, ServiceError> {
        Ok(Client { inner: block_on(client::Client::connect(target))? })
    }

    /// Blocking form of [`client::Client::with`].
    ///
    /// # Errors
    /// The errors of [`client::Client::with`].
    pub fn with(config: ClientConfig) -> Result<Client, ServiceError> {
        Ok(Client { inner: block_on(client::Client::with(config))? })
    }

    /// Returns the client of a function.
    pub(crate) fn of_function(inner: client::Client) -> Client {
        Client { inner }
    }

    /// Returns the task of the target, like [`client::Client::target`].
    pub fn target(&self) -> &TaskId {
        self.inner.target()
    }

    /// Returns the cluster as the target knows it, like [`client::Client::cluster`].
    pub fn cluster(&self) -> ClusterSpec {
        self.inner.cluster()
    }

    /// Blocking form of [`client::Client::declare`].
    ///
    /// # Errors
    /// The errors of [`client::Client::declare`].
    pub fn declare(
        &self,
        variables: &[VariableSpec],
        fill: impl FnOnce(&mut InitialValues<'_>),
    ) -> Result<(), ServiceError> {
        self.inner.wait(|| self.inner.declare(variables, fill))
    }

    /// Blocking form of [`client::Client::describe`].
    ///
    /// # Errors
    /// The errors of [`client::Client::describe`].
    pub fn describe(&self, task: &TaskId) -> Result<Description, ServiceError> {
        self.inner.wait(|| self.inner.describe(task))
    }

    /// Blocking form of [`client::Client::call`].
    ///
    /// # Errors
    /// The errors of [`client::Client::call`].
    pub fn call(&self, call: Call) -> Result<Outputs, ServiceError> {
        self.inner.wait(|| self.inner.call(call))
    }

    /// Blocking form of [`client::Client::run`].
    ///
    /// # Errors
    /// The errors of [`client::Client::run`].
    pub fn run<const N: usize>(&self, calls: [Call; N]) -> Result<[Outputs; N], ServiceError> {
        self.inner.wait(|| self.inner.run(calls))
    }

    /// Blocking form of [`client::Client::run_all`].
    ///
    /// # Errors
    /// The errors of [`client::Client::run_all`].
    pub fn run_all(
        &self,
        calls: impl IntoIterator<Item = Call>,
    ) -> Result<Vec<Outputs>, ServiceError> {
        self.inner.wait(|| self.inner.run_all(calls))
    }

    /// Calls a function whose outputs stay on its server, and waits for its end. This is the
    /// blocking form of [`client::Client::keep`].
    ///
    /// # Errors
    /// The errors of [`client::Client::keep`].
    pub fn keep(&self, call: Call) -> Result<Kept, ServiceError> {
        self.inner.wait(|| async { Ok(self.inner.keep(call)?.await?.0) })
    }

    /// Blocking form of [`client::Client::fetch`].
    ///
    /// # Errors
    /// The errors of [`client::Client::fetch`].
    pub fn fetch(&self, kept: &Kept, output: &str) -> Result<Value, ServiceError> {
        self.inner.wait(|| self.inner.fetch(kept, output))
    }

    /// The client with futures in place of blocking operations.
    pub fn inner(&self) -> &client::Client {
        &self.inner
    }
}
