//! The blocking form of the function server.

use std::sync::Arc;

use pushpull_common::ids::TaskId;
use pushpull_net::ServicePeers;

use crate::block_on::block_on;
use crate::{
    FunctionServerConfig, FunctionServerError, FunctionServerHandle, FunctionServerListener,
    Functions,
};

/// A [`crate::FunctionServer`] with blocking operations.
///
/// ```
/// use pushpull_services::blocking::{FunctionClient, FunctionServer};
/// use pushpull_services::{Call, Functions};
///
/// let server = FunctionServer::local(Functions::new().add("hello", |_| Ok("Hello!")))?;
/// let client = FunctionClient::connect(server.target())?;
/// assert_eq!(client.call(Call::new("hello"))?.text()?, "Hello!");
/// server.stop();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[doc(alias = "tf.train.Server")]
pub struct FunctionServer {
    inner: crate::FunctionServer,
}

impl FunctionServer {
    /// Binds an address, like [`crate::FunctionServer::listen`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionServer::listen`].
    pub fn listen(address: &str) -> Result<FunctionServerListener, FunctionServerError> {
        crate::FunctionServer::listen(address)
    }

    /// Binds an address that other machines may reach, like
    /// [`crate::FunctionServer::listen_insecure`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionServer::listen_insecure`].
    pub fn listen_insecure(address: &str) -> Result<FunctionServerListener, FunctionServerError> {
        crate::FunctionServer::listen_insecure(address)
    }

    /// Starts serving in the background, on threads of the server, like
    /// [`FunctionServerListener::start`].
    ///
    /// # Errors
    /// The errors of [`FunctionServerListener::start`].
    pub fn start(
        listener: FunctionServerListener,
        config: FunctionServerConfig,
    ) -> Result<FunctionServer, FunctionServerError> {
        Ok(FunctionServer { inner: listener.start(config)? })
    }

    /// Starts a cluster of one task in this process, like [`crate::FunctionServer::local`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionServer::local`].
    #[doc(alias = "create_local_server")]
    pub fn local(functions: Functions) -> Result<FunctionServer, FunctionServerError> {
        Ok(FunctionServer { inner: crate::FunctionServer::local(functions)? })
    }

    /// Starts a server whose clients another server of the same task accepts, like
    /// [`crate::FunctionServer::beside`].
    ///
    /// # Errors
    /// The errors of [`crate::FunctionServer::beside`].
    pub fn beside(config: FunctionServerConfig) -> Result<FunctionServer, FunctionServerError> {
        Ok(FunctionServer { inner: crate::FunctionServer::beside(config)? })
    }

    /// Returns the address of the server as a client's target.
    pub fn target(&self) -> &str {
        self.inner.target()
    }

    /// Returns the task of the server.
    pub fn task(&self) -> &TaskId {
        self.inner.task()
    }

    /// Returns a handle on the server.
    pub fn handle(&self) -> FunctionServerHandle {
        self.inner.handle()
    }

    /// Returns the admission of clients that another server has accepted, like
    /// [`crate::FunctionServer::peers`].
    pub fn peers(&self) -> Arc<dyn ServicePeers> {
        self.inner.peers()
    }

    /// Blocks this thread until the server has ended. Another thread ends it by
    /// [`FunctionServerHandle::stop`].
    #[doc(alias = "join")]
    pub fn serve(self) {
        block_on(self.inner.serve(std::future::pending()));
    }

    /// Stops the server, and blocks this thread until the server has ended and its port is free:
    /// see [`FunctionServerHandle::stop`]. Dropping the server does the same.
    pub fn stop(self) {
        drop(self.inner);
    }
}
