//! The blocking form of the server, for programs without an async runtime.

use crate::config::PsConfig;
use crate::error::{ListenError, ServeError, StartError};
use crate::runtime::{PsHandle, PsListener};

/// A [`crate::Ps`] with blocking operations.
///
/// ```
/// use pushpull_common::{cluster::ClusterSpec, ids::TaskId};
/// use pushpull_ps::{Adam, PsConfig, blocking::Ps};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let listener = Ps::listen("127.0.0.1:0")?;
/// let cluster = ClusterSpec::builder().job("ps", [listener.address()]).build()?;
/// let ps = Ps::start(listener, PsConfig::new(cluster, TaskId::ps(0), Adam::default()))?;
/// let handle = ps.handle();
/// // It serves in the background; another thread may end it.
/// std::thread::spawn(move || handle.stop());
/// ps.serve()?;
/// # Ok(()) }
/// ```
#[doc(alias = "tf.train.Server")]
#[derive(Debug)]
pub struct Ps {
    inner: crate::Ps,
}

impl Ps {
    /// Binds an address; see [`crate::Ps::listen`].
    pub fn listen(address: &str) -> Result<PsListener, ListenError> {
        PsListener::bind(address, false)
    }

    /// Binds an address that other machines may reach; see [`crate::Ps::listen_insecure`].
    pub fn listen_insecure(address: &str) -> Result<PsListener, ListenError> {
        PsListener::bind(address, true)
    }

    /// Starts serving in the background, on threads of the server; see [`PsListener::start`].
    pub fn start(listener: PsListener, config: PsConfig) -> Result<Ps, StartError> {
        Ok(Ps { inner: listener.start(config)? })
    }

    /// Returns a handle on the server.
    pub fn handle(&self) -> PsHandle {
        self.inner.handle()
    }

    /// Blocks this thread until the server has ended, and port and files are free.
    ///
    /// Another thread ends it by a [`PsHandle`]: [`PsHandle::stop`] and [`PsHandle::suspend`] at
    /// once, [`PsHandle::finish`] after the workers. Otherwise it ends when all workers are gone
    /// ([`PsConfig::exit_when_done`]).
    #[doc(alias = "join")]
    pub fn serve(mut self) -> Result<(), ServeError> {
        // Each thread of the server ends when it is stopped.
        self.inner.join()
    }

    /// Stops the server, and blocks until port and files are free.
    ///
    /// The server finishes whole pushes and sends their answers first. Dropping it does the same,
    /// and loses the error.
    pub fn stop(self) -> Result<(), ServeError> {
        self.handle().stop();
        self.serve()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use pushpull_common::cluster::ClusterSpec;
    use pushpull_common::ids::TaskId;
    use pushpull_optim::optimizer::Sgd;

    use super::*;

    fn start() -> (Ps, String) {
        let listener = Ps::listen("127.0.0.1:0").unwrap();
        let address = listener.address();
        let cluster = ClusterSpec::builder().job("ps", [&address]).build().unwrap();
        let config = PsConfig::new(cluster, TaskId::ps(0), Sgd::new(0.1));
        (Ps::start(listener, config).unwrap(), address)
    }

    #[test]
    fn a_server_serves_until_it_is_stopped_and_frees_its_port() {
        let (ps, address) = start();
        let error = Ps::listen(&address).unwrap_err();
        assert!(matches!(error, ListenError::InUse { .. }), "{error}");
        let handle = ps.handle();
        let serving = std::thread::spawn(move || ps.serve());
        handle.stop();
        serving.join().unwrap().unwrap();
        TcpListener::bind(&address).unwrap();

        let (ps, address) = start();
        ps.stop().unwrap();
        TcpListener::bind(&address).unwrap();
    }
}
