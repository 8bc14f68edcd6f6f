//! Hostile bytes on the wire: the connection ends, the server does not.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

use super::cluster::{Cluster, LONG, vector};

/// Sends bytes and waits for the server to close.
fn send(address: &str, bytes: &[u8], name: &str) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    // The server may have seen enough before all is sent.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{name}: {error}"),
    }
    assert!(answer.len() < 4096, "{name}: a stranger is told little");
}

#[test]
fn every_hostile_frame_ends_its_connection_and_nothing_else() {
    let cluster = Cluster::sgd(1, |config| config);
    let address = cluster.handle().address().to_owned();
    let mut worker = cluster.worker(0);
    let mut params = worker.join(&[vector("w", 10)], |_| ()).unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/common/tests/hostile");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "bin") {
            let bytes = std::fs::read(&path).unwrap();
            send(&address, &bytes, &path.display().to_string());
            count += 1;
        }
    }
    assert!(count >= 20, "only {count} hostile frames in {folder}");
    // The worker that was there before goes on over the same connection.
    let token = worker.token().unwrap().unwrap();
    worker.pull(&token, &mut params).unwrap();
    let mut gradients = worker.gradients();
    gradients.view_mut::<f32>("w").unwrap().fill(1.0);
    worker.push(token, gradients).unwrap();
    assert_eq!(cluster.handle().metrics().global_step, 1);
    cluster.stop();
}

#[test]
fn a_crowd_that_says_nothing_leaves_room_for_those_who_do() {
    let cluster = Cluster::sgd(1, |config| config.waiting_connections_max(8));
    let address = cluster.handle().address().to_owned();
    let crowd: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
    drop(crowd);
    let mut worker = cluster.worker(0);
    worker.join(&[vector("w", 1)], |_| ()).unwrap();
    cluster.stop();
}
