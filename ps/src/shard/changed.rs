//! Which clients have changed since the last commit.

use super::replicas::ClientKey;

/// A set of clients, which takes no memory of its own once it has had each of them.
#[derive(Debug, Default)]
pub(crate) struct Changed {
    /// Whether a client is listed, by its number.
    is_listed: Vec<bool>,
    listed: Vec<ClientKey>,
}

impl Changed {
    pub(crate) fn insert(&mut self, client: ClientKey) {
        let index = client.0 as usize;
        if index >= self.is_listed.len() {
            self.is_listed.resize(index + 1, false);
        }
        if !std::mem::replace(&mut self.is_listed[index], true) {
            self.listed.push(client);
        }
    }

    /// Puts them behind others, and forgets them.
    pub(crate) fn append_to(&mut self, all: &mut Vec<ClientKey>) {
        self.listed.iter().for_each(|client| self.is_listed[client.0 as usize] = false);
        all.append(&mut self.listed);
    }
}

impl Extend<ClientKey> for Changed {
    fn extend<T: IntoIterator<Item = ClientKey>>(&mut self, clients: T) {
        clients.into_iter().for_each(|client| self.insert(client));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_is_named_once_and_again_after_it_was_taken() {
        let (mut changed, mut all) = (Changed::default(), vec![ClientKey(7)]);
        changed.extend([3, 0, 3].map(ClientKey));
        changed.append_to(&mut all);
        assert_eq!(all, [7, 3, 0].map(ClientKey));
        changed.insert(ClientKey(3));
        changed.append_to(&mut all);
        changed.append_to(&mut all);
        assert_eq!(all, [7, 3, 0, 3].map(ClientKey));
    }
}
