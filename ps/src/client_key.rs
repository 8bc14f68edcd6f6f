//! The key of a client, and sets of clients.

/// The index of a client's entry, which stays the same in all its epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClientKey(pub(crate) u32);

/// The set of the clients that have changed since the last commit. It allocates no more once every
/// client has been in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct ChangedClients {
    /// Whether a client is in `listed`, indexed by its key.
    is_listed: Vec<bool>,
    listed: Vec<ClientKey>,
}

impl ChangedClients {
    pub(crate) fn insert(&mut self, client: ClientKey) {
        let index = client.0 as usize;
        if index >= self.is_listed.len() {
            self.is_listed.resize(index + 1, false);
        }
        if !std::mem::replace(&mut self.is_listed[index], true) {
            self.listed.push(client);
        }
    }

    /// Returns whether no client has changed.
    #[cfg(any(test, fuzzing, feature = "simulation"))]
    pub(crate) fn is_empty(&self) -> bool {
        self.listed.is_empty()
    }

    /// Appends the clients to `all`, and clears the set.
    pub(crate) fn append_to(&mut self, all: &mut Vec<ClientKey>) {
        self.listed.iter().for_each(|client| self.is_listed[client.0 as usize] = false);
        all.append(&mut self.listed);
    }
}

impl Extend<ClientKey> for ChangedClients {
    fn extend<T: IntoIterator<Item = ClientKey>>(&mut self, clients: T) {
        clients.into_iter().for_each(|client| self.insert(client));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_is_listed_once_until_the_set_is_cleared() {
        let mut changed = ChangedClients::default();
        let mut all = vec![ClientKey(7)];
        changed.extend([3, 0, 3].map(ClientKey));
        changed.append_to(&mut all);
        assert_eq!(all, [7, 3, 0].map(ClientKey));
        changed.insert(ClientKey(3));
        changed.append_to(&mut all);
        changed.append_to(&mut all);
        assert_eq!(all, [7, 3, 0, 3].map(ClientKey));
    }
}
